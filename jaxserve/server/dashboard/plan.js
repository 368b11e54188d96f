// A form for operators: the policy that decides, and the precisions and KV pages of the plan.

import { element, setText } from "./dom.js";
import { Refused, authorization, refusal } from "./stream.js";

const ROOT = new URL("..", import.meta.url);
const QUANTIZED = ["int8", "int4", "int3"];
const RANGE = /^(\d{1,5})(?:-(\d{1,5}))?$/;
let forms = 0;

/** The form in `host`. `key()` returns the admin key, or null if the server wants none. */
export class PlanForm {
  constructor(host, key) {
    this.key = key;
    this.seen = new Set(QUANTIZED); // precisions that a layer may have
    const id = (name) => `plan-${forms}-${name}`;
    forms += 1;
    this.policy = element("select", { id: id("policy") });
    this.layers = element("input", { id: id("layers"), value: "all", size: "8", autocomplete: "off", spellcheck: "false" });
    this.precision = element("input", { id: id("precision"), list: id("known"), size: "8", autocomplete: "off", spellcheck: "false", placeholder: "as now" });
    this.pages = element("input", { id: id("pages"), inputmode: "numeric", size: "6", autocomplete: "off", placeholder: "as now" });
    this.instance = element("select", { id: id("instance") });
    this.known = element("datalist", { id: id("known") });
    this.answer = element("p", { class: "plan-answer", role: "status" });
    this.apply = element("button", { type: "submit" }, "Change plan");
    const labelled = (text, field) => element("label", { for: field.id }, `${text} `, field);
    this.instanceField = labelled("Instance", this.instance);
    const choose = element("form", { class: "plan-form" }, labelled("Policy", this.policy), element("button", { type: "submit" }, "Set policy"));
    const change = element("form", { class: "plan-form", autocomplete: "off" });
    change.append(this.instanceField, labelled("Layers", this.layers), labelled("to", this.precision), labelled("KV pages", this.pages), this.known, this.apply);
    host.append(choose, change, this.answer);
    choose.addEventListener("submit", (event) => this.#act(event, () => this.#setPolicy()));
    change.addEventListener("submit", (event) => this.#act(event, () => this.#setPlan()));
  }

  /** Shows the policies, instances and precisions of a status as choices. */
  show({ policy, policies = [], instances, precisions, num_instances: total }) {
    if (choices(this.policy, policies.filter((name) => name !== "manual"))) this.policy.value = policy;
    choices(this.instance, total > 1 ? ["all", ...instances] : ["all"]);
    this.instanceField.hidden = total < 2;
    Object.keys(precisions).forEach((name) => this.seen.add(name));
    choices(this.known, [...this.seen]);
  }

  async #act(event, act) {
    event.preventDefault();
    this.answer.className = "plan-answer";
    setText(this.answer, "The server checks this …");
    try {
      setText(this.answer, await act());
      this.answer.classList.add("good");
    } catch (error) {
      setText(this.answer, error instanceof Refused || error instanceof RangeError ? error.message : "The server cannot be reached.");
      this.answer.classList.add("bad");
    }
  }

  async #setPolicy() {
    const status = await this.#call("PUT", "admin/policy", { policy: this.policy.value });
    return `Accepted: the policy ${status.policy} decides from now on.`;
  }

  async #setPlan() {
    const plan = await this.#call("GET", "admin/plan?format=json");
    const chosen = this.instance.value;
    const pages = this.pages.value.trim();
    for (const instance of plan.instances) {
      if (chosen !== "all" && instance.name !== chosen) continue;
      edit(instance, this.layers.value, this.precision.value.trim(), pages ? wholeNumber(pages) : null);
    }
    await this.#call("PUT", "admin/plan", plan);
    return "Accepted: the engine changes to this plan, and the policy manual keeps it.";
  }

  async #call(method, path, body) {
    const headers = { "content-type": "application/json", ...authorization(this.key()) };
    const response = await fetch(new URL(path, ROOT), { method, headers, cache: "no-store", body: body && JSON.stringify(body) });
    if (!response.ok) throw await refusal(response);
    return response.json();
  }
}

/** Replaces the options of a list if they differ, and returns whether they did. */
function choices(list, names) {
  if (list.dataset.shown === names.join()) return false;
  list.dataset.shown = names.join();
  list.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  return true;
}

/** Changes a plan's instance: the chosen layers to a precision, and the KV pages of its stages to a number, if given. */
function edit(instance, layers, precision, pages) {
  const isChosen = chosenLayers(layers);
  let found = 0;
  for (const stage of instance.stages) {
    const blocks = {};
    for (const [name, before] of Object.entries(stage.blocks)) {
      const [, first, last] = /^layers\.(\d+)(?:-(\d+))?$/.exec(name) ?? [];
      if (first === undefined) blocks[name] = before;
      for (let layer = Number(first); layer <= Number(last ?? first); layer += 1) {
        found += isChosen(layer);
        blocks[`layers.${layer}`] = precision && isChosen(layer) ? precision : before;
      }
    }
    stage.blocks = blocks;
    if (pages !== null) stage.kv_pages = pages;
  }
  if (precision && !found) throw new RangeError(`No layer is in "${layers}".`);
}

/** Returns whether a layer is in a text such as "all", "3" or "0-3, 7". Throws RangeError for any other. */
function chosenLayers(text) {
  if (["", "all"].includes(text.trim())) return () => true;
  const ranges = text.split(",").map((part) => {
    const [, first, last] = RANGE.exec(part.trim()) ?? [];
    if (first === undefined) throw new RangeError('Layers are given as "all", or as numbers such as 0-3, 7.');
    return [Number(first), Number(last ?? first)];
  });
  return (layer) => ranges.some(([first, last]) => first <= layer && layer <= last);
}

function wholeNumber(text) {
  if (!/^\d{1,12}$/.test(text)) throw new RangeError("KV pages must be a whole number.");
  return Number(text);
}
