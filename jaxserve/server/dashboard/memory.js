// Memory: weights and KV pages against what the budget leaves for them, and the ledger's entries.

import { element, setQuantity, setText } from "./dom.js";
import { swatch } from "./chart.js";
import { brief, bytes, joined, percent } from "./format.js";

export const PARTS = [
  { name: "Weights", class: "weights", value: (sample) => sample.weight_bytes },
  { name: "KV used", class: "kv-used", value: (sample) => sample.kv_used_bytes },
  { name: "KV free", class: "kv-free", value: (sample) => sample.kv_free_bytes },
];
const SHOWN_ENTRIES = ["weights", "variants", "kv"]; // of the ledger: what the parts are, or become when it is used

export class Memory {
  constructor(nodes) {
    Object.assign(this, nodes);
    this.rest = 0;
    this.rows = PARTS.map((part) => {
      const bar = element("span", { class: `part ${part.class}` });
      const size = element("b");
      this.bar.append(bar);
      this.legend.append(element("li", {}, swatch(part.class), `${part.name} `, size));
      return { part, bar, size };
    });
    [this.other, this.budget] = ["Other", "Budget"].map((name) => {
      const size = element("b");
      this.legend.append(element("li", {}, `${name} `, size));
      return size;
    });
  }

  /** What weights and KV pages may take: the budget without the runtime, workspace and the like, which never change. */
  limit(sample) {
    return { value: sample.budget - this.rest, label: this.rest ? "budget less other" : "budget" };
  }

  setLedger(status, sample) {
    const entries = Object.entries(status.ledger).sort((a, b) => b[1] - a[1]);
    const used = entries.reduce((sum, [, size]) => sum + size, 0);
    const others = entries.reduce((sum, [name, size]) => sum + (SHOWN_ENTRIES.includes(name) ? 0 : size), 0);
    // Samples are of all devices together, the ledger is of each.
    this.rest = others * Math.max(1, Math.round(sample.budget / status.budget));
    const rows = [...entries, ["used", used], ["left of the budget", status.budget - used]].map(([name, size]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, joined(bytes(size)))),
    );
    this.table.replaceChildren(...rows);
  }

  show(sample) {
    const limit = this.limit(sample).value;
    for (const { part, bar, size } of this.rows) {
      bar.style.width = `${(part.value(sample) / limit) * 100}%`;
      setText(size, joined(bytes(part.value(sample))));
    }
    setText(this.other, joined(bytes(this.rest)));
    setText(this.budget, brief(bytes(sample.budget)));
    setQuantity(this.number, percent(sample.kv_usage));
    const cache = bytes(sample.kv_used_bytes + sample.kv_free_bytes);
    setText(this.total, `of ${joined(cache)} KV cache in use`);
    this.bar.setAttribute("aria-label", this.describe(sample));
  }

  describe(sample) {
    const parts = PARTS.map((part) => `${part.name} ${joined(bytes(part.value(sample)))}`).join(", ");
    return `${parts}, other ${joined(bytes(this.rest))}, budget ${brief(bytes(sample.budget))}`;
  }
}
