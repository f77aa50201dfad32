// Numbers as text. A missing one is a dash.

const DASH = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export const number = (value, digits = 0) =>
  missing(value) ? DASH : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** 1 → "1 turn", 2 → "2 turns" */
export const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** 0.0123 → "12.3 ms", 2.5 → "2.50 s", 90 → "1 min 30 s" */
export function seconds(value) {
  if (missing(value)) return DASH;
  const ms = value * 1000;
  if (ms === 0) return "0 ms";
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  const whole = Math.round(value);
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export const share = (value, digits = 0) => (missing(value) ? DASH : `${(100 * value).toFixed(digits)} %`);
export const times = (value) => (missing(value) ? DASH : `${value.toFixed(2)} ×`);

export function bytes(value) {
  if (missing(value)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 1000 && i < units.length - 1) { value /= 1000; i += 1; }
  return `${value.toFixed(i && value < 100 ? 1 : 0)} ${units[i]}`;
}

/** Unix seconds → "14:03:27" today, else with the date. */
export function clock(unix) {
  if (missing(unix)) return DASH;
  const date = new Date(unix * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}
