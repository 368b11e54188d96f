// The model as a strip of layers: a bar as high as a weight has bits, its number and its precision.

import { element, setText } from "./dom.js";
import { swatch } from "./chart.js";
import { bits, shortPrecision } from "./format.js";

const FULL = 16; // bits of a bar of full height; more if a layer has more
const MANY = 24; // layers of an instance from which on they are drawn smaller
const ROWS = 8; // of all instances, from which on their precisions are told by height and colour alone
const LEAST = { large: 32, small: 33, tiny: 19 }; // px that a layer needs
const GAP = { large: 5, small: 4, tiny: 3 }; // px, as in style.css
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

/** The class that gives a precision its colour: by its bits, whatever its name. */
export function tone(precision) {
  const size = bits(precision);
  return size >= 16 ? "full" : size >= 8 ? "int8" : size >= 4 ? "int4" : "int3";
}

export class Strip {
  constructor(host, legend) {
    Object.assign(this, { host, legend, shape: "", cells: [], strips: [] });
    new ResizeObserver(() => this.#arrange()).observe(host);
  }

  /** `instances`: per instance [{block, precision}, ...]. */
  show(instances) {
    const shape = instances.map((layers) => layers.map((layer) => layer.block).join()).join(";");
    if (shape !== this.shape) this.#build(instances);
    this.shape = shape;
    this.#arrange();
    const layers = instances.flat();
    const most = Math.max(FULL, ...layers.map((layer) => bits(layer.precision)));
    layers.forEach((layer, i) => this.#fill(this.cells[i], layer.precision, most));
    this.#count(layers);
  }

  #build(instances) {
    this.cells = [];
    this.strips = [];
    const rows = instances.map((layers, number) => {
      const title = instances.length > 1 ? [element("h3", {}, `Instance ${number}`)] : [];
      const cells = layers.map((layer) => this.#cell(layer.block));
      const strip = element("ol", { "aria-label": `Layers of instance ${number}` }, ...cells);
      this.strips.push(strip);
      return element("div", { class: "instance" }, ...title, strip);
    });
    this.host.replaceChildren(...rows);
  }

  /** Rows of equal length, and layers as large as there is room for. */
  #arrange() {
    const { width } = this.host.getBoundingClientRect();
    const rows = (strip, size) =>
      Math.ceil(strip.children.length / Math.max(1, Math.floor((width + GAP[size]) / (LEAST[size] + GAP[size]))));
    const many = this.strips.some((strip) => strip.children.length > MANY);
    const all = this.strips.reduce((sum, strip) => sum + rows(strip, "small"), 0);
    const size = !many ? "large" : all > ROWS ? "tiny" : "small";
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

  #fill(cell, precision, most) {
    if (cell.shown === precision) return;
    cell.node.classList.remove("full", "int8", "int4", "int3");
    cell.node.classList.add(tone(precision));
    cell.fill.style.height = `${(bits(precision) / most) * 100}%`;
    setText(cell.precision, shortPrecision(precision));
    if (cell.shown !== null) {
      const easing = STILL.matches ? "step-end" : "linear";
      cell.node.animate?.([{ outlineColor: "currentColor" }, { outlineColor: "transparent" }], { duration: 1500, easing });
    }
    cell.shown = precision;
  }

  #count(layers) {
    const counts = new Map();
    for (const { precision } of layers) counts.set(precision, (counts.get(precision) ?? 0) + 1);
    const names = [...counts.keys()].sort((a, b) => bits(b) - bits(a));
    const text = names.map((name) => `${name} ${counts.get(name)}`).join();
    if (text === this.counted) return;
    this.counted = text;
    this.legend.replaceChildren(
      ...names.map((name) => {
        const number = element("b", {}, String(counts.get(name)));
        return element("li", {}, swatch(tone(name)), `${name} `, number);
      }),
    );
  }
}
