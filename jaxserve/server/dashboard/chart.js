// SVG charts over time. All charts share one timeline: samples, range and cursor.

import { element, shape } from "./dom.js";
import { axisLabel, clockSeconds, minutes } from "./format.js";

const MARGIN = { top: 10, right: 4, bottom: 24, left: 50 };
const TICKS = 3;
const GAP = 4; // seconds; samples further apart are not joined
const X_STEPS = [10, 15, 30, 60, 120, 300, 600, 900];
const MIN_SPACE = 26; // px between two labels of the time axis
const PADDING = 12; // px next to the chart, into which a label may extend
const SLACK = 1.03;
const HALF_LETTER = 4; // px, half the width of a letter in a label
const PAGE_STEP = 30; // samples per page key
let ids = 0;

/**
 * The state that all charts share: `samples`, the range `from` to `to`, the sample at the `cursor` or null, and the
 * times of `marks`. `offset` turns times of the engine into seconds since the epoch.
 */
export class Timeline {
  constructor() {
    Object.assign(this, { samples: [], from: 0, to: 1, offset: 0, cursor: null, marks: [] });
    this.onCursor = () => {};
  }

  /** Returns the visible sample nearest to a time. */
  nearest(time) {
    let best = null;
    for (const sample of this.samples) {
      if (sample.time < this.from) continue;
      if (best === null || Math.abs(sample.time - time) <= Math.abs(best.time - time)) best = sample;
    }
    return best;
  }

  /** Moves the cursor to a sample, or to now if `sample` is null. */
  point(sample) {
    if (sample === this.cursor) return;
    this.cursor = sample;
    this.onCursor();
  }

  /** Moves the cursor by a number of samples. After the newest sample comes now. */
  step(by) {
    const { samples } = this;
    const at = this.cursor ? samples.indexOf(this.cursor) : samples.length;
    const oldest = samples.findIndex((sample) => sample.time >= this.from);
    const next = Math.max(oldest, at + by);
    this.point(next < samples.length ? samples[next] : null);
  }
}

/**
 * A chart of one or more series. Options:
 * - `series`: [{name, class, value(sample) -> number or null}]
 * - `stacked`: draws areas on top of each other instead of lines
 * - `reference()`: {value, label} of a reference line, or null
 * - `kind`: seconds, bytes or count
 * - `floor`: minimum top of the axis
 * - `least`: height in px that each area of a stacked chart has at least, unless its value is 0
 * - `alarm`: marks values above the reference
 * - `text(sample)`: describes a sample in words
 */
export class Chart {
  constructor(host, timeline, options) {
    Object.assign(this, { reference: () => null, kind: "count", floor: 0, least: 0, alarm: false, stacked: false }, options);
    this.host = host;
    this.timeline = timeline;
    this.clip = `clip-${(ids += 1)}`;
    this.svg = shape("svg", { "aria-hidden": "true" });
    host.append(this.svg);
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(host);
  }

  draw() {
    const { width, height } = this.host.getBoundingClientRect();
    if (width < 80 || height < 40) return;
    this.box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const visible = this.timeline.samples.filter((s) => s.time >= this.timeline.from - GAP);
    this.#scale(visible);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(
      ...this.#grid(),
      ...this.#marks(),
      ...(this.stacked ? this.#areas(visible) : this.#lines(visible)),
      ...this.#referenceLine(visible),
      ...this.#cursor(),
    );
    this.#describe();
  }

  #scale(samples) {
    const reference = this.reference()?.value ?? 0;
    let max = Math.max(this.floor, reference * (this.stacked ? 1 : 1.15));
    for (const sample of samples) max = Math.max(max, this.stacked ? this.#total(sample) : this.#max(sample));
    if (this.stacked && max < reference * SLACK) max = reference; // parts of a sample are measured at different moments
    this.stepY = this.exact ? max : niceStep(max / TICKS);
    this.top = this.exact ? max : Math.max(this.stepY, Math.ceil(max / this.stepY - 0.5) * this.stepY, max * 1.04);
  }

  #max(sample) {
    return Math.max(...this.series.map((series) => series.value(sample) ?? 0));
  }

  #total(sample) {
    return this.series.reduce((sum, series) => sum + (series.value(sample) ?? 0), 0);
  }

  #x(time) {
    const { from, to } = this.timeline;
    return this.box.left + ((time - from) / (to - from)) * (this.box.right - this.box.left);
  }

  #y(value) {
    return this.box.bottom - (value / this.top) * (this.box.bottom - this.box.top);
  }

  #grid() {
    const { left, right, bottom, top } = this.box;
    const found = [];
    for (let value = 0; value <= this.top * 1.001; value += this.stepY) {
      const y = this.#y(value);
      found.push(shape("line", { class: value ? "grid" : "axis", x1: left, x2: right, y1: y, y2: y }));
      const label = axisLabel(this.kind, value, this.stepY, this.top);
      found.push(shape("text", { class: "tick", x: left - 8, y: y + 4, "text-anchor": "end" }, label));
    }
    const { from, to, offset } = this.timeline;
    const writer = (step) => (step < 60 ? clockSeconds : minutes);
    const wide = (text) => 2 * HALF_LETTER * text.length;
    const fits = (step) => ((to - from) / step) * (wide(writer(step)(to)) + MIN_SPACE) <= right - left;
    const step = X_STEPS.find(fits) ?? X_STEPS.at(-1);
    const write = writer(step);
    for (let wall = Math.ceil((from + offset) / step) * step; wall <= to + offset; wall += step) {
      const x = this.#x(wall - offset);
      found.push(shape("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }));
      const label = write(wall);
      if (x < left || x + wide(label) / 2 > right + PADDING) continue; // the label would be cut off
      found.push(shape("text", { class: "tick", x, y: bottom + 18, "text-anchor": "middle" }, label));
    }
    const frame = shape("rect", { x: left, y: top - 2, width: right - left, height: bottom - top + 3 });
    found.push(shape("defs", {}, shape("clipPath", { id: this.clip }, frame)));
    return found;
  }

  /** Returns a mark on the time axis for each decision. */
  #marks() {
    const { bottom } = this.box;
    const inside = this.timeline.marks.filter((time) => time >= this.timeline.from && time <= this.timeline.to);
    return inside.map((time) => {
      const x = this.#x(time);
      return shape("path", { class: "mark", d: `M${x} ${bottom}l-3 5h6z` });
    });
  }

  #lines(samples) {
    const found = this.series.map((series) => {
      const d = this.#path(samples, (sample) => series.value(sample));
      return shape("path", { class: `line ${series.class}`, d, "clip-path": `url(#${this.clip})` });
    });
    const limit = this.alarm ? this.reference()?.value : null;
    if (limit == null) return found;
    const id = `${this.clip}-above`;
    const { left, right } = this.box;
    const height = Math.max(0, this.#y(limit));
    const above = shape("clipPath", { id }, shape("rect", { x: left, y: 0, width: right - left, height }));
    const d = this.#path(samples, (sample) => this.series[0].value(sample), limit);
    const line = this.#path(samples, (sample) => this.series[0].value(sample));
    return [
      shape("defs", {}, above),
      shape("path", { class: "area above", d, "clip-path": `url(#${id})` }),
      ...found,
      shape("path", { class: "line above", d: line, "clip-path": `url(#${id})` }),
    ];
  }

  #areas(samples) {
    const heights = new Map(samples.map((sample) => [sample, this.#heights(sample)]));
    const below = new Map();
    return this.series.map((series, i) => {
      const points = samples.map((sample) => {
        const base = below.get(sample) ?? 0;
        const next = base + heights.get(sample)[i];
        below.set(sample, next);
        return [this.#x(sample.time), this.box.bottom - base, this.box.bottom - next, sample.time];
      });
      const runs = split(points, (a, b) => b[3] - a[3] > GAP);
      const d = runs
        .map((run) => {
          const upper = run.map(([x, , y]) => `${round(x)} ${round(y)}`);
          const lower = run.map(([x, y]) => `${round(x)} ${round(y)}`).reverse();
          return `M${[...upper, ...lower].join("L")}Z`;
        })
        .join("");
      return shape("path", { class: `area ${series.class}`, d, "clip-path": `url(#${this.clip})` });
    });
  }

  /** Returns the heights in px of a sample's areas. Those below `least` are drawn higher, and the highest one lower. */
  #heights(sample) {
    const { top, bottom } = this.box;
    const heights = this.series.map((series) => ((series.value(sample) ?? 0) / this.top) * (bottom - top));
    const drawn = heights.map((height) => (height > 0 ? Math.max(height, this.least) : 0));
    const added = drawn.reduce((sum, height, i) => sum + height - heights[i], 0);
    drawn[drawn.indexOf(Math.max(...drawn))] -= added;
    return drawn;
  }

  /** Returns the path of a line through the samples, broken at gaps. With `base`, returns the area between both. */
  #path(samples, value, base = null) {
    const points = samples.map((s) => [this.#x(s.time), value(s), s.time]).filter(([, v]) => v != null);
    const runs = split(points, (a, b) => b[2] - a[2] > GAP);
    return runs
      .map((run) => {
        const line = run.map(([x, v]) => `${round(x)} ${round(this.#y(v))}`).join("L");
        if (base === null) return `M${line}h0.01`;
        const y = round(this.#y(base));
        return `M${round(run[0][0])} ${y}L${line}L${round(run.at(-1)[0])} ${y}Z`;
      })
      .join("");
  }

  /** Returns the reference line, with its label at the leftmost place where no line of the chart crosses it. */
  #referenceLine(samples) {
    const reference = this.reference();
    if (!reference) return [];
    const y = this.#y(reference.value);
    const { left, right, top } = this.box;
    const below = y < top + 14; // no room above the line
    const wide = 2 * HALF_LETTER * reference.label.length + 12;
    let x = left;
    for (const sample of this.stacked ? [] : samples) {
      const at = this.#x(sample.time);
      if (at > x + wide) break;
      if (at > x && this.#max(sample) > reference.value) x = at;
    }
    if (x + wide > right) x = left;
    return [
      shape("line", { class: "reference", x1: left, x2: right, y1: y, y2: y }),
      shape("text", { class: "reference-label", x: x + 6, y: below ? y + 14 : y - 5 }, reference.label),
    ];
  }

  #cursor() {
    const sample = this.timeline.cursor;
    if (!sample || sample.time < this.timeline.from) return [];
    const x = this.#x(sample.time);
    const { top, bottom } = this.box;
    const when = clockSeconds(sample.time + this.timeline.offset);
    const half = HALF_LETTER * when.length + 4;
    const middle = Math.min(Math.max(x, half), this.box.right - half + MARGIN.right);
    const found = [
      shape("line", { class: "cursor", x1: x, x2: x, y1: top, y2: bottom }),
      shape("rect", { class: "cursor-ground", x: middle - half, y: bottom + 6, width: 2 * half, height: 17, rx: 4 }),
      shape("text", { class: "cursor-label", x: middle, y: bottom + 19, "text-anchor": "middle" }, when),
    ];
    if (this.stacked) return found;
    for (const series of this.series) {
      const value = series.value(sample);
      if (value != null) found.push(shape("circle", { class: `point ${series.class}`, cx: x, cy: this.#y(value), r: 4 }));
    }
    return found;
  }

  /** Describes the chart for screen readers, but not every second while it has the focus. */
  #describe() {
    const { cursor, samples, from, to, offset } = this.timeline;
    const sample = cursor ?? samples.at(-1);
    if (!sample || (document.activeElement === this.host && this.described === cursor)) return;
    this.described = cursor;
    const when = cursor ? clockSeconds(sample.time + offset) : "now";
    this.host.setAttribute("aria-valuemin", Math.round(from - to));
    this.host.setAttribute("aria-valuenow", cursor ? Math.round(sample.time - to) : 0);
    this.host.setAttribute("aria-valuetext", `${when}: ${this.text(sample)}`);
  }

  #listen() {
    const { host, timeline } = this;
    for (const [name, value] of Object.entries({
      tabindex: 0,
      role: "slider",
      "aria-label": `${this.name}, over time`,
      "aria-describedby": "cursor-help",
      "aria-valuemax": 0,
    })) {
      host.setAttribute(name, value);
    }
    const at = (event) => {
      const { left } = host.getBoundingClientRect();
      const share = (event.clientX - left - this.box.left) / (this.box.right - this.box.left);
      return timeline.nearest(timeline.from + share * (timeline.to - timeline.from));
    };
    host.addEventListener("pointermove", (event) => this.box && timeline.point(at(event)));
    host.addEventListener("pointerdown", (event) => this.box && timeline.point(at(event)));
    // Touch keeps the cursor until the finger touches something else or begins to scroll.
    host.addEventListener("pointerleave", (event) => event.pointerType === "touch" || timeline.point(null));
    host.addEventListener("pointercancel", () => timeline.point(null));
    host.addEventListener("blur", (event) => event.relatedTarget?.closest(".plot") || timeline.point(null));
    host.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -PAGE_STEP, PageDown: PAGE_STEP, Home: -Infinity };
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key in moves) timeline.step(moves[event.key]);
      else if (event.key === "Escape" || event.key === "End") timeline.point(null);
      else return;
      event.preventDefault();
    });
  }
}

/** Returns a colour swatch of a series for a legend. */
export const swatch = (name) => element("span", { class: `swatch ${name}`, "aria-hidden": "true" });

const round = (value) => Math.round(value * 10) / 10;

/** Returns the smallest 1, 2 or 5 times a power of ten that is at least `min`. */
function niceStep(min) {
  const power = 10 ** Math.floor(Math.log10(Math.max(min, 1e-9)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= min * 0.999);
}

/** Splits items into runs at the places where `isBreak(previous, item)` is true. */
function split(items, isBreak) {
  const runs = [];
  items.forEach((item, i) => {
    if (i === 0 || isBreak(items[i - 1], item)) runs.push([item]);
    else runs.at(-1).push(item);
  });
  return runs;
}
