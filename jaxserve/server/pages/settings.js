// The settings of the conversation: what is sent with each request. Empty fields leave the choice to the server.

import { byId, setText } from "../dashboard/dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const TEXTS = ["mode", "system", "thinking", "tools", "schema", "stop"];

/** Returns complete settings, with the values of `kept` as far as they are valid. */
export const withDefaults = (kept) =>
  Object.fromEntries([...NUMBERS, ...TEXTS].map((name) => [name, typeof kept[name] === "string" ? kept[name] : ""]));

/** Returns the parameters of sampling that are set. */
export function sampling(settings) {
  const set = NUMBERS.filter((name) => settings[name].trim()).map((name) => [name, Number(settings[name])]);
  const stop = settings.stop.split("\n").filter(Boolean);
  return { ...Object.fromEntries(set), ...(stop.length ? { stop } : {}) };
}

/** Returns the tools that are offered to the model, in the form of the API. */
export function tools({ tools: text }) {
  if (!text.trim()) return [];
  const given = JSON.parse(text);
  return (Array.isArray(given) ? given : [given]).map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

/** Returns the format that the answer has to have, or null. */
export function responseFormat({ schema }) {
  if (!schema.trim()) return null;
  return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } };
}

/** The dialog of the settings. Calls `changed(settings)` after each valid change. */
export class SettingsDialog {
  constructor(settings, changed) {
    this.dialog = byId("settings");
    this.form = byId("settings-form");
    this.settings = settings;
    this.changed = changed;
    for (const [name, value] of Object.entries(settings)) this.form.elements[name].value = value;
    this.form.addEventListener("input", () => this.#take());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#take()) this.dialog.close();
    });
    byId("settings-reset").addEventListener("click", () => {
      for (const name of Object.keys(settings)) this.form.elements[name].value = "";
      this.#take();
    });
  }

  open() {
    this.dialog.showModal();
  }

  /** Shows what the model can do: settings without effect are hidden. */
  adapt(capabilities, mode) {
    const chat = mode === "chat";
    byId("thinking-field").hidden = !chat || !capabilities.includes("thinking");
    byId("tools-field").hidden = byId("schema-field").hidden = byId("system-field").hidden = !chat;
  }

  /** Takes the values of the form, and returns whether all are valid. Invalid ones are not taken. */
  #take() {
    const faults = [];
    const next = { ...this.settings };
    for (const name of Object.keys(next)) {
      const field = this.form.elements[name];
      const fault = faultOf(name, field);
      if (fault) faults.push(fault);
      else next[name] = field.value;
      if (field.setAttribute) field.setAttribute("aria-invalid", String(Boolean(fault)));
    }
    setText(byId("settings-error"), faults.join(" "));
    this.settings = next;
    this.changed(next);
    return !faults.length;
  }
}

/** Returns what is wrong with a field, or "". */
function faultOf(name, field) {
  if (field.validity?.valid === false) return `${field.labels[0].firstChild.textContent.trim()}: ${field.validationMessage}`;
  if ((name !== "tools" && name !== "schema") || !field.value.trim()) return "";
  const title = name === "tools" ? "Tools" : "JSON schema";
  try {
    const value = JSON.parse(field.value);
    if (typeof value !== "object" || value === null) return `${title}: this must be ${name === "tools" ? "a list of functions" : "an object"}.`;
    if (name === "tools" && [value].flat().some((tool) => typeof (tool?.function ?? tool)?.name !== "string")) return "Tools: each needs a name.";
    return "";
  } catch (error) {
    return `${title}: this is not valid JSON (${error.message}).`;
  }
}
