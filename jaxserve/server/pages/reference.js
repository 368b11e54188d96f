// The reference of the API: every endpoint of openapi.json, with its fields, a curl command and a form to try it.

import { appendAll, byId, element, setText } from "../dashboard/dom.js";
import { authorization } from "../dashboard/stream.js";
import { ROOT, getJson, inWords, key } from "./api.js";
import { coloured, copyButton } from "./code.js";

const ADMIN_KEY = "jaxserve-admin-key"; // in sessionStorage, as in the dashboard
const MAX_DEPTH = 4; // of objects in objects
const MAX_ROWS = 12; // fields of an object; of more, only the usual ones are unfolded
const USUAL = ["model", "messages", "input", "prompt", "stream", "max_tokens", "max_output_tokens", "temperature", "top_p", "stop", "seed", "n", "tools", "tool_choice", "response_format", "system", "instructions"];
const MAX_SHOWN = 50_000; // characters of an answer
const HELLO = [{ role: "user", content: "Hello" }];
const EXAMPLES = {
  "/v1/chat/completions": { messages: HELLO, max_tokens: 64 },
  "/v1/completions": { prompt: "def add(a, b):", max_tokens: 32 },
  "/v1/responses": { input: "Hello", max_output_tokens: 64 },
  "/v1/responses/input_tokens": { input: "Hello" },
  "/v1/messages": { messages: HELLO, max_tokens: 64 },
  "/v1/messages/count_tokens": { messages: HELLO },
  "/v1/embeddings": { input: "a text" },
  "/v1/score": { text_1: "sort a list", text_2: ["def sort(x):", "import os"] },
  "/v1/rerank": { query: "sort a list", documents: ["def sort(x):", "import os"] },
  "/tokenize": { prompt: "Hello" },
  "/detokenize": { tokens: [1, 2, 3] },
  "/admin/policy": { policy: "static" },
};

let schemas = {};
let model = "MODEL";

async function load() {
  try {
    const [api] = await Promise.all([getJson("openapi.json"), nameModel()]);
    schemas = api.components?.schemas ?? {};
    byId("notice").hidden = true;
    setText(byId("summary"), `${api.info.summary}. Version ${api.info.version}.`);
    show(api.paths);
  } catch (error) {
    setText(byId("notice"), error.status === 401 ? "This server wants an API key." : inWords(error));
    byId("notice").hidden = false;
    if (error.status === 401) {
      byId("keys").open = true;
      byId("api-key").focus();
    }
  }
}

/** Learns the model's name for the examples, if the model is loaded. */
async function nameModel() {
  model = (await getJson("v1/models").catch(() => null))?.data[0]?.id ?? model;
}

function show(paths) {
  const groups = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const group = operation.tags?.[0] ?? "other";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(new Endpoint(method, path, operation));
    }
  }
  const sections = [...groups].map(([group, endpoints]) => [element("h2", {}, group), ...endpoints.map(({ node }) => node)]);
  byId("main").replaceChildren(...sections.flat());
  const links = [...groups].map(([group, endpoints]) => [element("h2", {}, group), ...endpoints.map((endpoint) => endpoint.link())]);
  byId("contents").replaceChildren(...links.flat());
  openTarget();
}

/** Opens the endpoint that the address names. */
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target?.matches(".endpoint")) return;
  target.open = true;
  target.scrollIntoView();
}

class Endpoint {
  constructor(method, path, operation) {
    Object.assign(this, { method, path, operation, id: `${method}${path.replaceAll(/\W+/g, "-")}` });
    const says = (operation.description ?? operation.summary ?? "").split("\n")[0];
    const badge = element("span", { class: `method ${method}` }, method.toUpperCase());
    const summary = element("summary", {}, badge, element("span", { class: "path" }, path), element("span", { class: "says" }, ...words(says)));
    this.node = element("details", { class: "endpoint panel", id: this.id }, summary);
    this.node.addEventListener("toggle", () => this.node.open && this.#fill(), { once: true });
  }

  link() {
    const link = element("a", { href: `#${this.id}` }, `${this.method.toUpperCase()} ${this.path}`);
    link.addEventListener("click", () => (this.node.open = true));
    return link;
  }

  #fill() {
    const { operation, method, path } = this;
    const rest = (operation.description ?? "").split("\n").slice(1).join("\n").trim();
    const parts = rest ? [element("p", {}, ...words(rest))] : [];
    const parameters = operation.parameters ?? [];
    if (parameters.length) {
      const rows = parameters.map(({ name, in: place, required, schema }) => row(name, `${typeOf(schema)}, in the ${place}`, required, schema));
      parts.push(element("h3", {}, "Parameters"), tableOf(rows));
    }
    const body = operation.requestBody?.content;
    const schema = resolved(body?.["application/json"]?.schema);
    const example = body ? JSON.stringify(exampleOf(path, schema), null, 2) : null;
    const command = curl(method, path, example);
    const copy = element("div", { class: "row" }, element("h3", {}, "Command"), copyButton("Copy", () => command));
    parts.push(copy, element("pre", { tabindex: "0" }, command), new Trial(this, parameters, example).node);
    if (schema) parts.push(element("h3", {}, "Fields of the body"), ...fieldsOf(schema));
    this.node.append(appendAll(element("div"), parts));
  }
}

/** Return a description's parts, of which those between backticks are code. */
function words(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

/** A form that sends a request and shows the answer. */
class Trial {
  constructor({ method, path, operation }, parameters, example) {
    Object.assign(this, { method, path });
    this.fields = parameters.map((parameter) => [parameter, element("input", { "aria-label": parameter.name })]);
    this.body = example === null ? null : element("textarea", { rows: String(example.split("\n").length + 1), spellcheck: "false", "aria-label": "Body" });
    if (this.body) this.body.value = example;
    this.answer = element("pre", { tabindex: "0", "aria-label": "Answer", hidden: "" });
    this.said = element("span", { role: "status" });
    const send = element("button", { type: "submit" }, "Send");
    const labels = this.fields.map(([{ name }, field]) => element("label", {}, name, field));
    this.node = element("form", { class: "try", autocomplete: "off", "aria-label": `Try ${operation.summary ?? path}` });
    this.node.append(element("h3", {}, "Try it"), ...labels, ...(this.body ? [this.body] : []));
    this.node.append(element("div", { class: "row" }, send, this.said), this.answer);
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  async #send() {
    setText(this.said, "Waiting for the answer …");
    const given = sessionStorage.getItem(ADMIN_KEY);
    const headers = authorization(this.path.startsWith("/admin") && given ? given : key.get());
    if (this.body) headers["content-type"] = "application/json";
    const began = performance.now();
    try {
      const response = await fetch(this.#url(), { method: this.method.toUpperCase(), headers, body: this.body?.value, cache: "no-store" });
      const text = (await response.text()).slice(0, MAX_SHOWN);
      setText(this.said, `${response.status} ${response.statusText}, after ${Math.round(performance.now() - began)} ms`);
      this.answer.hidden = text === "";
      this.answer.replaceChildren();
      appendAll(this.answer, formatted(text));
    } catch {
      setText(this.said, "The server cannot be reached.");
    }
  }

  #url() {
    let path = this.path.slice(1);
    const query = new URLSearchParams();
    for (const [{ name, in: place }, { value }] of this.fields) {
      if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
      else if (place === "query" && value) query.set(name, value);
    }
    const url = new URL(path, ROOT);
    url.search = query;
    return url;
  }
}

/** Returns an answer as nodes: JSON with line breaks and colours, other text as it is. */
function formatted(text) {
  try {
    return coloured("json", JSON.stringify(JSON.parse(text), null, 2));
  } catch {
    return [text];
  }
}

function curl(method, path, example) {
  const url = new URL(path.slice(1), ROOT);
  const verb = method === "get" || (method === "post" && example) ? "" : ` -X ${method.toUpperCase()}`;
  const lines = [`curl${verb} ${decodeURI(url.href)}`];
  if (key.get() || path.startsWith("/admin")) lines.push("-H 'authorization: Bearer KEY'");
  if (example) lines.push("-H 'content-type: application/json'", `-d '${JSON.stringify(JSON.parse(example)).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

function exampleOf(path, schema) {
  const found = EXAMPLES[path] ?? Object.fromEntries((schema?.required ?? []).map((name) => [name, null]));
  return "model" in (schema?.properties ?? {}) ? { model, ...found } : found;
}

// -- schemas

const resolved = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema);

/** Returns the table of an object's fields, with those of objects in them below it. */
function fieldsOf(schema, depth = 0) {
  const fields = Object.entries(schema.properties ?? {});
  const needed = new Set(schema.required);
  const rank = ([name]) => (needed.has(name) ? 0 : USUAL.includes(name) ? 1 : 2);
  fields.sort((a, b) => rank(a) - rank(b));
  const rows = fields.map(([name, field]) => row(name, typeOf(field), needed.has(name), field));
  const shown = rows.length > MAX_ROWS ? fields.filter((field) => rank(field) < 2).length : rows.length;
  const parts = shown ? [tableOf(rows.slice(0, shown))] : [];
  const rest = rows.length - shown;
  if (rest) parts.push(element("details", {}, element("summary", {}, `${rest} further fields`), tableOf(rows.slice(shown))));
  for (const [name, field] of depth < MAX_DEPTH ? fields : []) {
    for (const inner of objectsIn(field)) {
      parts.push(element("details", {}, element("summary", {}, `Fields of ${name}: ${inner.title}`), ...fieldsOf(inner, depth + 1)));
    }
  }
  return parts;
}

/** Returns the schemas of objects with known fields in a field. */
function objectsIn(schema) {
  const found = resolved(schema);
  if (!found) return [];
  if (found.properties) return [found];
  return [...(found.anyOf ?? []), ...(found.oneOf ?? []), ...(found.items ? [found.items] : [])].flatMap(objectsIn);
}

const tableOf = (rows) => element("table", {}, appendAll(element("tbody"), rows));

function row(name, type, required, schema) {
  const title = element("th", { scope: "row" }, element("code", {}, name));
  if (required) title.append(" ", element("span", { class: "needed" }, "required"));
  const limits = [["default", schema.default], ["at least", schema.minimum], ["at most", schema.maximum]];
  const notes = limits.filter(([, value]) => value != null).map(([text, value]) => `${text} ${JSON.stringify(value)}`);
  return element("tr", {}, title, element("td", {}, [type, ...notes].join("; ")), element("td", {}, ...words(schema.description ?? "")));
}

/** Returns the type of a schema in words. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.filter((option) => option.type !== "null").map(typeOf))].join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items)}` : "list";
  return schema.type ?? "any";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const [api, admin] = ["api-key", "admin-key"].map((id) => byId(id).value.trim());
  if (api) key.set(api);
  else key.forget();
  if (admin) sessionStorage.setItem(ADMIN_KEY, admin);
  else sessionStorage.removeItem(ADMIN_KEY);
  load();
});
addEventListener("hashchange", openTarget);
load();
