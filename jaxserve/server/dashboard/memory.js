// The memory panel: all ledger entries against the budget, and weights and KV pages, which change, enlarged.

import { element, setQuantity, setText } from "./dom.js";
import { swatch } from "./chart.js";
import { brief, bytes, joined, percent } from "./format.js";

export const PARTS = [
  { name: "Weights", class: "weights", value: (sample) => sample.weight_bytes },
  { name: "KV used", class: "kv-used", value: (sample) => sample.kv_used_bytes },
  { name: "KV free", class: "kv-free", value: (sample) => sample.kv_free_bytes },
  { name: "KV rounding", class: "kv-rounding", value: (sample) => sample.kv_rounding_bytes },
];
const OTHER = { name: "Other", class: "other", value: (sample) => sample.other_bytes };
const WHOLE = [OTHER, ...PARTS];
const TOTALS = [
  { name: "Left", class: "left", value: (sample) => sample.budget - OTHER.value(sample) - held(sample) },
  { name: "Budget", class: "budget", value: (sample) => sample.budget, round: true },
];
const APART = new Set(["weights", "kv"]); // entries of the ledger that are not part of "Other"
const MEANINGS = {
  workspace: "buffers of a step",
  exchange: "second copies while the plan changes",
  variants: "layers kept in further precisions",
  runtime: "programs and libraries",
};
// The room for weights and KV pages is the enlarged scale unless it is more than this multiple of their bytes.
const MAX_ROOM = 3;
const MAX_ENLARGED = 0.5; // share of the budget above which nothing is enlarged

/** Returns the bytes of weights and KV pools. */
const held = (sample) => PARTS.reduce((sum, part) => sum + part.value(sample), 0);

/** Returns the bytes that the budget leaves for weights and KV pools, after runtime, workspace, pinned variants etc. */
const room = (sample) => sample.budget - OTHER.value(sample);

const written = (part, sample) => (part.round ? brief : joined)(bytes(part.value(sample)));

export class Memory {
  constructor(nodes) {
    Object.assign(this, nodes);
    this.span = 1; // bytes across the enlarged bar
    this.bars = WHOLE.map((part) => this.#bar(this.whole, part));
    this.close = PARTS.map((part) => this.#bar(this.closer, part));
    this.sizes = [...WHOLE, ...TOTALS].map((part) => {
      const size = element("data");
      this.legend.append(element("li", {}, swatch(part.class), `${part.name} `, size));
      return { part, size };
    });
  }

  #bar(host, part) {
    const node = element("span", { class: `part ${part.class}` });
    host.append(node);
    return { part, node };
  }

  /** Returns the limit as a reference line for the chart, or null if it is far above all samples. */
  reference() {
    return this.limit === null ? null : { value: this.limit, label: "budget less other" };
  }

  /** Updates the scale and the ledger table. `samples` are all samples shown. */
  update(status, samples) {
    const newest = samples.at(-1);
    const maxHeld = samples.reduce((bytes, sample) => Math.max(bytes, held(sample)), 1);
    this.limit = room(newest) <= MAX_ROOM * maxHeld ? room(newest) : null;
    this.span = this.limit ?? maxHeld;
    const entries = Object.entries(status.ledger).sort((a, b) => b[1] - a[1]);
    const used = entries.reduce((sum, [, size]) => sum + size, 0);
    const rows = [...entries, ["used", used], ["left of the budget", status.budget - used]].map(([name, size]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, joined(bytes(size)))),
    );
    this.table.replaceChildren(...rows);
    setText(this.other, partsOfOther(entries));
    const devices = Math.round(newest.budget / status.budget);
    setText(this.title, `Every entry of the ledger${devices > 1 ? `, on the fullest of ${devices} devices` : ""}`);
  }

  show(sample) {
    const from = OTHER.value(sample) / sample.budget;
    const share = this.span / sample.budget;
    const alone = share > MAX_ENLARGED;
    this.bar.classList.toggle("alone", alone);
    for (const { part, node } of this.bars) node.style.width = `${(part.value(sample) / sample.budget) * 100}%`;
    for (const { part, node } of this.close) node.style.width = `${(part.value(sample) / this.span) * 100}%`;
    this.beam.style.clipPath = `polygon(${from * 100}% 0, ${(from + share) * 100}% 0, 100% 100%, 0 100%)`;
    for (const { part, size } of this.sizes) {
      size.value = String(part.value(sample));
      setText(size, written(part, sample));
    }
    setQuantity(this.number, percent(sample.kv_usage));
    const cache = bytes(sample.kv_used_bytes + sample.kv_free_bytes);
    setText(this.total, `of ${joined(cache)} KV cache in use`);
    this.bar.setAttribute("aria-label", this.describe(sample));
  }

  describe(sample) {
    return [...WHOLE, ...TOTALS].map((part) => `${part.name} ${written(part, sample)}`).join(", ");
  }
}

/** Returns in words what "Other" consists of, the largest entries first. */
function partsOfOther(entries) {
  const parts = entries.filter(([name, size]) => size > 0 && !APART.has(name));
  const named = parts.map(([name, size]) => `${name} ${joined(bytes(size))}${name in MEANINGS ? ` (${MEANINGS[name]})` : ""}`);
  return named.length ? `Other: ${named.join(", ")}` : "";
}
