// Formatting of numbers for people: three significant digits and a unit.

const NONE = ["–", ""];
const CLOCK = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const MINUTES = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat([], { month: "short", day: "numeric" });
const SHORT = { bfloat16: "bf16", float16: "fp16", float32: "fp32", float64: "fp64" };
const UNITS = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

/** Returns about three significant digits: 0.42, 4.20, 42.0, 420. */
function digits(value) {
  if (value === 0) return "0";
  return value.toFixed(Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0);
}

export function seconds(value) {
  if (value == null) return NONE;
  return value < 0.9995 ? [digits(value * 1e3), "ms"] : [digits(value), "s"];
}

export function bytes(value) {
  if (value == null) return NONE;
  const [size, unit] = UNITS.find(([size]) => Math.abs(value) >= size) ?? UNITS.at(-1);
  return [size === 1 ? String(value) : digits(value / size), unit];
}

export const percent = (share) => [String(Math.round(share * 100)), "%"];
export const joined = ([number, unit]) => (unit ? `${number} ${unit}` : number);

/** Joins number and unit without trailing zeros, for limits: 2 s, not 2.00 s. */
export const brief = ([number, unit]) => joined([number.includes(".") ? number.replace(/\.?0+$/, "") : number, unit]);

/** Returns the time of day of `time` (seconds since the epoch), with the day if it is not today. */
export function clock(time) {
  const moment = new Date(time * 1e3);
  const today = moment.toDateString() === new Date().toDateString();
  return today ? CLOCK.format(moment) : `${DAY.format(moment)}, ${CLOCK.format(moment)}`;
}

export const minutes = (time) => MINUTES.format(new Date(time * 1e3));
export const clockSeconds = (time) => CLOCK.format(new Date(time * 1e3));
export const shortPrecision = (name) => SHORT[name] ?? name;

/** Replaces ASCII arrows and comparisons of the server by single characters, which no line break can split. */
export const signs = (text) => text.replaceAll("->", "→").replaceAll(">=", "≥").replaceAll("<=", "≤");

/** Returns the bits of a weight from the name of its precision. */
export const bits = (name) => Number(/\d+/.exec(name)?.[0] ?? 16);

/** Returns the axis label of `value`, with the digits that `step` needs and the unit that suits `top`. */
export function axisLabel(kind, value, step, top) {
  let [size, unit] = [1, ""];
  if (kind === "seconds") [size, unit] = top < 0.9995 ? [1e-3, "ms"] : [1, "s"];
  if (kind === "bytes") [size, unit] = UNITS.find(([size]) => top >= size) ?? UNITS.at(-1);
  const places = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return value === 0 ? "0" : `${(value / size).toFixed(places)}${unit && ` ${unit}`}`;
}
