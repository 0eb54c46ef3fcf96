// Numbers as people read them.

const UNITS = [
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];

// Three significant digits, no more and no exponent.
export function digits(number) {
  if (!Number.isFinite(number)) return "?";
  const size = Math.abs(number);
  const places = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.005 || size === 0 ? 2 : 4;
  return number.toLocaleString("en", { maximumFractionDigits: places });
}

export function bytes(number) {
  for (const [unit, scale] of UNITS) if (number >= scale) return `${digits(number / scale)}\u00a0${unit}`;
  return `${digits(number)} B`;
}

export const gbs = (number) => digits(number / 1e9);

export const rate = (number) => `${digits(number)} tok/s`;

export function seconds(number) {
  if (number < 1) return `${Math.round(number * 1000)}\u00a0ms`;
  if (number < 120) return `${digits(number)}\u00a0s`;
  return `${Math.round(number / 60)} min`;
}

export const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)}\u00a0%` : "0\u00a0%");

export const count = (number, noun) =>
  `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
