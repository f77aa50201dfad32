// A file with its progress.

/** A promise of its bytes. onProgress({ size, total }): total is 0 where the server does not say. */
export async function download(url, headers, onProgress) {
  const response = await fetch(url, { headers });
  if (!response.ok) throw new Error(`The model cannot be loaded: status ${response.status}.`);
  const total = Number(response.headers.get("content-length")) || 0, chunks = [], reader = response.body.getReader();
  let size = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    chunks.push(part.value);
    size += part.value.length;
    onProgress({ size, total });
  }
  return new Blob(chunks);
}
