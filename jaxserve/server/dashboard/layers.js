// The strip of layers: for each layer its index, its precision, and a bar whose height is the bits of a weight.

import { element, setText } from "./dom.js";
import { swatch } from "./chart.js";
import { bits, joined, percent, shortPrecision } from "./format.js";

const FULL_BITS = 16; // at full height, unless a layer has more
const MAX_LARGE = 24; // layers of an instance; more are drawn smaller
// Rows of all instances together; with more, only height and colour show the precision.
const MAX_ROWS = 8;
const MIN_WIDTH = { large: 32, small: 33, tiny: 19 }; // px of a layer
const GAP = { large: 5, small: 4, tiny: 3 }; // px, as in style.css
const CONDITIONS = { exchanging: "KV pages on their way", failed: "✕ failed, others take its place" };
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

/** Returns the CSS class for the colour of a precision, which depends only on its bits. */
export function tone(precision) {
  const size = bits(precision);
  return size >= 16 ? "full" : size >= 8 ? "int8" : size >= 4 ? "int4" : "int3";
}

/** Returns the devices of an instance in words, with a bar between those of different stages. */
function where({ devices, stages = [] }) {
  if (stages.length > 1) return `stages on devices ${stages.map((stage) => stage.devices.join(", ")).join(" | ")}`;
  return `${devices.length > 1 ? "devices" : "device"} ${devices.join(", ")}`;
}

export class Strip {
  constructor(host, legend) {
    Object.assign(this, { host, legend, shape: "", cells: [], strips: [], states: [], several: false });
    new ResizeObserver(() => this.#arrange()).observe(host);
  }

  /**
   * Shows a status: `layers` has for each of `instances` its layers [{block, precision}, ...], and `instance_states`
   * where it runs, and its load.
   */
  show({ layers: instances, instances: names, num_instances: total, precisions, instance_states: states = [] }) {
    this.several ||= total > 1; // once there were several, the only one has its name as well
    this.several ||= states.some(({ state }) => state === "failed"); // which the only one has to say, too
    const shape = [this.several, total, names, ...instances.map((layers) => layers.map((layer) => layer.block).join())].join(";");
    if (shape !== this.shape) this.#build(instances, names, total);
    this.shape = shape;
    this.#arrange();
    const layers = instances.flat();
    const maxBits = Math.max(FULL_BITS, ...layers.map((layer) => bits(layer.precision)));
    layers.forEach((layer, i) => this.#fill(this.cells[i], layer.precision, maxBits));
    this.states.forEach((node, i) => this.#place(node, states[i]));
    this.strips.forEach((strip, i) => this.#divide(strip, states[i]?.stages ?? []));
    this.#count(precisions);
  }

  #build(instances, names, total) {
    this.cells = [];
    this.strips = [];
    this.states = [];
    const rows = instances.map((layers, index) => {
      const state = element("span", { class: "state" });
      const title = total > 1 || this.several ? [element("h3", {}, `Instance ${names[index]} `, state)] : [];
      this.states.push(state);
      const cells = layers.map((layer) => this.#cell(layer.block));
      const strip = element("ol", { "aria-label": `Layers of instance ${names[index]}` }, ...cells);
      this.strips.push(strip);
      return element("div", { class: "instance" }, ...title, strip);
    });
    const left = total - instances.length;
    if (left > 0) rows.push(element("p", {}, `and ${left} more instances, most of which are like each other`));
    this.host.replaceChildren(...rows);
  }

  /** Says where an instance runs, and its load. */
  #place(node, state) {
    if (!state) return;
    const parts = [where(state)];
    if (state.lanes > 1) parts.unshift(`group of ${state.lanes}`);
    const condition = state.state ?? (state.draining ? "draining" : "serving");
    if (condition !== "serving") parts.push(CONDITIONS[condition] ?? condition);
    parts.push(`${state.running} running, KV ${joined(percent(state.kv_usage))}`);
    if (state.held) parts.push(`${state.held} held until their KV has come`);
    setText(node, parts.join(" · "));
    node.classList.toggle("draining", condition === "draining" || condition === "exchanging");
    node.classList.toggle("failed", condition === "failed");
  }

  /** Marks the first layer of each stage after the first one. */
  #divide(strip, stages) {
    let first = 0;
    const cuts = new Set(stages.map((stage) => (first += stage.layers)));
    [...strip.children].forEach((cell, i) => cell.classList.toggle("cut", cuts.has(i)));
  }

  /** Arranges the layers in rows of equal length, as large as the width allows. */
  #arrange() {
    const { width } = this.host.getBoundingClientRect();
    const rows = (strip, size) =>
      Math.ceil(strip.children.length / Math.max(1, Math.floor((width + GAP[size]) / (MIN_WIDTH[size] + GAP[size]))));
    const many = this.strips.some((strip) => strip.children.length > MAX_LARGE);
    const all = this.strips.reduce((sum, strip) => sum + rows(strip, "small"), 0);
    const size = all > MAX_ROWS ? "tiny" : many ? "small" : "large";
    for (const strip of this.strips) {
      strip.className = `strip ${size}`;
      strip.style.gridTemplateColumns = `repeat(${Math.ceil(strip.children.length / rows(strip, size))}, minmax(0, 1fr))`;
    }
  }

  #cell(block) {
    const fill = element("span", { class: "fill" });
    const precision = element("span", { class: "precision" });
    const number = element("span", { class: "layer" }, block.replace(/^layers\./, ""));
    const track = element("span", { class: "track", "aria-hidden": "true" }, fill);
    const node = element("li", { class: "cell" }, track, number, " ", precision);
    this.cells.push({ node, fill, precision, shown: null });
    return node;
  }

  #fill(cell, precision, maxBits) {
    if (cell.shown === precision) return;
    cell.node.classList.remove("full", "int8", "int4", "int3");
    cell.node.classList.add(tone(precision));
    cell.fill.style.height = `${(bits(precision) / maxBits) * 100}%`;
    setText(cell.precision, shortPrecision(precision));
    if (cell.shown !== null) {
      const easing = STILL.matches ? "step-end" : "linear";
      cell.node.animate?.([{ outlineColor: "currentColor" }, { outlineColor: "transparent" }], { duration: 1500, easing });
    }
    cell.shown = precision;
  }

  #count(precisions) {
    const names = Object.keys(precisions).sort((a, b) => bits(b) - bits(a));
    const text = names.map((name) => `${name} ${precisions[name]}`).join();
    if (text === this.counted) return;
    this.counted = text;
    this.legend.replaceChildren(
      ...names.map((name) => {
        const number = element("b", {}, String(precisions[name]));
        return element("li", {}, swatch(tone(name)), `${name} `, number);
      }),
    );
  }
}
