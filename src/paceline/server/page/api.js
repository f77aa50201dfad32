// Requests to the server. Everything that may go wrong is one ApiError with a sentence for people.

const KEY = "paceline-key";

export class ApiError extends Error {
  /** status: 0 where no answer came. param, code: as the server names them. */
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, param, code, retryAfter });
  }
}

export const key = {
  get: () => { try { return sessionStorage.getItem(KEY) ?? ""; } catch { return key.held ?? ""; } },
  set: (value) => { key.held = value; try { sessionStorage.setItem(KEY, value); } catch { /* only in memory */ } },
};

/** askForKey(reason): opens the dialog; true if there is a new key. */
export function makeApi(askForKey) {
  let asking = null; // many requests may get a 401 at once: one dialog

  async function send(path, { method = "GET", body, signal, again = true } = {}) {
    const headers = {};
    if (key.get()) headers.authorization = `Bearer ${key.get()}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    const error = await problem(response);
    if (response.status === 401 && again) {
      const sent = headers.authorization ?? "";
      asking ??= askForKey(sent ? "The server does not know this key." : "").finally(() => { asking = null; });
      if (await asking) return send(path, { method, body, signal, again: false });
    }
    throw error;
  }

  const get = async (path, options) => (await send(path, options)).json();
  const post = async (path, body, options) => (await send(path, { ...options, method: "POST", body })).json();

  /** Sends a body, and calls `onEvent` with the JSON of each server-sent event. Aborting ends it quietly. */
  async function stream(path, body, onEvent, { signal } = {}) {
    const response = await send(path, { method: "POST", body, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the server broke off in the middle of the answer.");
      }
      if (part.done) return;
      rest += part.value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, event.error);
        onEvent(event);
      }
    }
  }

  /** Calls `get` again and again while the page is visible: `poll("/page/live", 1000, draw)` returns the stop function. */
  function poll(path, everyMs, onData, onError = () => {}) {
    const stopped = new AbortController();
    let timer = 0;
    const round = async () => {
      if (!document.hidden) {
        try { onData(await get(path, { signal: stopped.signal })); }
        catch (error) { if (error.name !== "AbortError") onError(error); }
      }
      if (!stopped.signal.aborted) timer = setTimeout(round, everyMs);
    };
    round();
    return () => { stopped.abort(); clearTimeout(timer); };
  }

  return { get, post, stream, poll };
}

/** What an answer of another status says. */
export async function problem(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const status = response.status;
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* no JSON */ }
  const later = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  const message = error.message ? sentence(error.message) : `The server answered with status ${status}.`;
  return new ApiError(message + later, { status, retryAfter, param: error.param, code: error.code });
}

/** Capital and full stop; the name of a parameter stays as it is. */
const sentence = (text) => `${/^[a-z]+[ ,]/.test(text) ? text[0].toUpperCase() : text[0]}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
