// The dashboard: connects the event stream, the samples and the panels that show them.

import { Chart, Timeline, swatch } from "./chart.js";
import { byId, element, setQuantity, setText } from "./dom.js";
import { brief, clock, clockSeconds, joined, seconds, signs } from "./format.js";
import { Strip, tone } from "./layers.js";
import { Log } from "./log.js";
import { Memory, PARTS } from "./memory.js";
import { PlanForm } from "./plan.js";
import { Requests } from "./requests.js";
import { Refused, Stream } from "./stream.js";

const KEY = "jaxserve-admin-key"; // in sessionStorage: gone with the tab
const KEPT = 15 * 60; // seconds of history
const MIN_RANGE = 60; // seconds that the charts show at least
const MIN_AREA = 5; // px of the area of a precision that few layers have
const TONES = ["full", "int8", "int4", "int3"];
const NOTHING = "The policy has not had to change anything yet.";
// Seconds by which an event may be late before the offset between the clocks is measured again.
const JITTER = 1.5;

const timeline = new Timeline();
const state = { status: null, range: 900, heard: null, roomUsed: false };
const strip = new Strip(byId("instances"), byId("precisions"));
const log = new Log({ list: byId("log"), empty: byId("log-empty"), count: byId("log-count") });
const memory = new Memory({
  bar: byId("memory-bar"),
  whole: byId("memory-whole"),
  beam: byId("memory-beam"),
  closer: byId("memory-closer"),
  legend: byId("memory-legend"),
  number: byId("memory"),
  total: byId("cache"),
  other: byId("memory-other"),
  table: byId("ledger").tBodies[0],
  title: byId("ledger-title"),
});

const slo = (name = "slo_ttft") => state.status?.[name] ?? null;
/** Returns the line of an objective in a chart, or null without one. */
const objective = (name) =>
  slo(name) === null ? null : { value: slo(name), label: `SLO ${brief(seconds(slo(name)))}` };
const inWords = (value) => (value == null ? "nothing measured" : joined(seconds(value)));
const layersOf = (sample, name) =>
  Object.entries(sample.precisions).reduce((sum, [key, count]) => sum + (tone(key) === name ? count : 0), 0);
const QUEUE = [
  { name: "Running", class: "running", value: (sample) => sample.running },
  { name: "Waiting", class: "waiting", value: (sample) => sample.waiting },
  { name: "In the waiting room", class: "room", value: (sample) => (state.roomUsed ? (sample.waiting_room ?? 0) : null) },
];

const RATES = [
  { name: "Generated", class: "running", value: (sample) => sample.generated_tokens_per_s ?? 0 },
  { name: "Prompt", class: "waiting", value: (sample) => sample.prompt_tokens_per_s ?? 0 },
];

const charts = [
  new Chart(byId("plot-layers"), timeline, {
    name: "Layers by precision",
    stacked: true,
    exact: true,
    floor: 1,
    least: MIN_AREA,
    series: TONES.toReversed().map((name) => ({ name, class: name, value: (sample) => layersOf(sample, name) })),
    text: (sample) => Object.entries(sample.precisions).map(([name, count]) => `${count} in ${name}`).join(", "),
  }),
  new Chart(byId("plot-ttft"), timeline, {
    name: "Time to first token, P95",
    kind: "seconds",
    floor: 0.01,
    alarm: true,
    series: [{ name: "TTFT", class: "main", value: (sample) => sample.ttft_p95 }],
    reference: () => objective("slo_ttft"),
    text: (sample) => `${inWords(sample.ttft_p95)}${late(sample) ? ", above the SLO" : ""}`,
  }),
  new Chart(byId("plot-tpot"), timeline, {
    name: "Time per output token",
    kind: "seconds",
    floor: 0.001,
    series: [{ name: "TPOT", class: "main", value: (sample) => sample.tpot }],
    reference: () => objective("slo_tpot"),
    text: (sample) => inWords(sample.tpot),
  }),
  new Chart(byId("plot-throughput"), timeline, {
    name: "Throughput",
    floor: 10,
    series: RATES,
    text: (sample) => RATES.map((series) => `${perSecond(series.value(sample))} ${series.name.toLowerCase()}`).join(", "),
  }),
  new Chart(byId("plot-memory"), timeline, {
    name: "Memory",
    kind: "bytes",
    floor: 1e6,
    stacked: true,
    series: PARTS,
    reference: () => (timeline.samples.length ? memory.reference() : null),
    text: (sample) => memory.describe(sample),
  }),
  new Chart(byId("plot-queue"), timeline, {
    name: "Queue",
    floor: 4,
    series: QUEUE,
    text: (sample) => `${sample.running} running, ${sample.waiting} waiting${inRoom(sample)}`,
  }),
];

function inRoom(sample) {
  return sample.waiting_room ? `, ${sample.waiting_room} in the waiting room: no instance can hold them` : "";
}

/** Adds an item with a number for each of some series to a list, and returns the nodes of the numbers. */
function numbersIn(list, allSeries) {
  return allSeries.map((series) => {
    const number = element("b", { class: "number" });
    list.append(element("li", {}, series.class ? swatch(series.class) : "", number, ` ${series.name.toLowerCase()}`));
    return number;
  });
}

const queueNumbers = numbersIn(byId("queue"), QUEUE);
const rateNumbers = numbersIn(byId("throughput"), RATES);
const perSecond = (rate) => (rate > 0 && rate < 9.95 ? rate.toFixed(1) : String(Math.round(rate)));
const requests = new Requests(byId("requests"), byId("refusals"));
const plan = new PlanForm(byId("change"), () => stream.key);

function late(sample) {
  return slo() !== null && sample.ttft_p95 != null && sample.ttft_p95 > slo();
}

// -- panels

/** Shows the numbers at the cursor, or the current ones. */
function showMoment() {
  const sample = timeline.cursor ?? timeline.samples.at(-1);
  if (!sample) return;
  document.body.classList.toggle("past", timeline.cursor !== null);
  setQuantity(byId("ttft"), seconds(sample.ttft_p95));
  setQuantity(byId("tpot"), seconds(sample.tpot));
  const badge = byId("slo");
  badge.className = `badge ${sample.ttft_p95 == null ? "" : late(sample) ? "bad" : "good"}`;
  setText(badge, verdict(sample));
  setText(byId("rate"), sample.tpot ? `${(1 / sample.tpot).toFixed(0)} tokens/s per request` : "nothing generated");
  RATES.forEach((series, i) => setText(rateNumbers[i], perSecond(series.value(sample))));
  QUEUE.forEach((series, i) => setText(queueNumbers[i], String(series.value(sample))));
  queueNumbers.at(-1).parentElement.hidden = !sample.waiting_room;
  memory.show(sample);
  const { cursor, offset } = timeline;
  if (document.body.dataset.state === "live") say(cursor ? `At ${clockSeconds(cursor.time + offset)}` : "Live", "live");
}

function verdict(sample) {
  if (sample.ttft_p95 == null) return "no first token recently";
  if (slo() === null) return "";
  const limit = brief(seconds(slo()));
  return late(sample) ? `▲ above the SLO of ${limit}` : `✓ within the SLO of ${limit}`;
}

function showCharts() {
  const { time } = state.status;
  const oldest = timeline.samples[0]?.time ?? time;
  timeline.to = time;
  timeline.from = time - Math.min(state.range, Math.max(MIN_RANGE, time - oldest));
  charts.forEach((chart) => chart.draw());
}

function showStatus({ model, phase, status }) {
  setText(byId("model"), model);
  document.title = `${model} · jaxserve`;
  setText(byId("policy"), status.policy);
  const target = status.target_version;
  setText(byId("plan"), String(status.plan_version));
  const ending = phase === "terminating" || phase === "draining";
  const moving = ending ? "shutting down" : status.busy ? `◐ changing to ${target ?? "another"}` : "steady";
  setText(byId("moving"), moving);
  showQuality(status.quality);
  byId("moving").className = `badge ${moving === "steady" ? "" : "warn"}`;
  // Once shown, the note stays, so that the panels below it do not move.
  if (status.note) byId("note").hidden = false;
  setText(byId("note"), signs(status.note) || "waiting for nothing");
  const idle = status.policy === "static" ? "The policy is static: the plan does not change." : NOTHING;
  setText(byId("log-empty"), idle);
  strip.show(status);
  plan.show(status);
}

/** Shows what the plan in force costs in quality. */
function showQuality(quality) {
  if (!quality) return;
  const { loss, nats, floor, measured } = quality;
  setText(byId("loss"), nats === null ? percentLoss(loss) : `${percentLoss(loss)}, ${nats.toPrecision(2)} nats a token`);
  const limit = floor === null ? "no floor" : `floor ${percentLoss(floor)}`;
  setText(byId("floor"), loss === 0 ? limit : `${measured ? "measured" : "assumed"}, ${limit}`);
  byId("floor").className = `badge ${floor !== null && loss > floor ? "warn" : ""}`;
}

const percentLoss = (share) => `${Number((share * 100).toFixed(1))} %`;

/** Shows an event of the server. The first event of a connection has the whole history. */
function showEvent(event, first) {
  const { status } = event;
  if (first) {
    timeline.samples = [];
    timeline.cursor = null;
    log.clear();
  }
  const offset = Date.now() / 1e3 - status.time;
  if (first || Math.abs(offset - timeline.offset) > JITTER) timeline.offset = offset;
  timeline.samples.push(...event.samples);
  while (timeline.samples.length && timeline.samples[0].time < status.time - KEPT - 1) timeline.samples.shift();
  if (timeline.cursor && !timeline.samples.includes(timeline.cursor)) timeline.cursor = null;
  state.roomUsed = timeline.samples.some((sample) => sample.waiting_room); // no line without any
  state.status = status;
  state.heard = Date.now() / 1e3;
  if (event.decisions) {
    timeline.marks = event.decisions.map((decision) => decision.time);
    log.show(event.decisions, timeline.offset);
    if (!first && event.decisions.length) announce(event.decisions.at(-1));
  }
  showPanels(true);
  showStatus(event);
  if (event.requests) requests.show(event.requests, status.time, first);
  if (timeline.samples.length) memory.update(status, timeline.samples);
  showCharts();
  showMoment();
}

/** Announces a decision to screen readers. */
function announce({ policy, outcome, reason }) {
  setText(byId("said"), `${policy}, ${outcome}: ${signs(reason)}`);
}

// -- the connection

function say(text, kind) {
  document.body.dataset.state = kind;
  setText(byId("connection"), text);
}

function notice(text) {
  setText(byId("notice-text"), text);
  byId("notice").hidden = text === "";
}

/** Shows or hides the panels. */
function showPanels(visible) {
  byId("panels").hidden = !visible;
  document.body.classList.toggle("bare", !visible);
}

function askForKey(wrong) {
  byId("key-form").hidden = false;
  setText(byId("key-error"), wrong ? "The server did not accept this key." : "");
  byId("key").focus();
}

const stream = new Stream(new URL("events", import.meta.url), {
  open() {
    say("Live", "live");
    notice("");
    byId("key-form").hidden = true;
    byId("forget").hidden = !stream.key;
  },
  event: showEvent,
  locked() {
    notice("");
    const wrong = stream.key !== null;
    lock(wrong);
  },
  lost(error, delay) {
    say(state.heard ? `Disconnected since ${clock(state.heard)}` : "Not connected", "lost");
    const why = error instanceof Refused ? error.message : "The server cannot be reached";
    notice(`${why.replace(/^./, (c) => c.toUpperCase())}. Trying again in ${Math.round(delay / 1e3)} s.`);
  },
});

/** Forgets the key, hides the data that it gave access to, and asks for a key. */
function lock(wrong) {
  stream.key = null;
  sessionStorage.removeItem(KEY);
  byId("forget").hidden = true;
  state.status = state.heard = null;
  showPanels(false);
  say("Locked", "locked");
  askForKey(wrong);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  stream.key = byId("key").value.trim();
  sessionStorage.setItem(KEY, stream.key);
  byId("key").value = "";
  say("Connecting", "connecting");
  stream.start();
});
byId("retry").addEventListener("click", () => stream.start());
byId("forget").addEventListener("click", () => {
  stream.stop();
  lock(false);
});
byId("range").addEventListener("change", (event) => {
  state.range = Number(event.target.value);
  timeline.point(null);
  if (state.status) showCharts();
});
document.addEventListener("pointerdown", (event) => {
  // The path at the time of the event: the touched node may have been redrawn since.
  const path = event.composedPath();
  if (!path.some((node) => node.classList?.contains("plot"))) timeline.point(null);
});
timeline.onCursor = () => {
  charts.forEach((chart) => chart.draw());
  showMoment();
};

stream.key = sessionStorage.getItem(KEY);
stream.start();
