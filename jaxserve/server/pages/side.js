// Beside the conversation: the layers with their precisions, KV pages, speed and queue, from the dashboard's events.

import { Chart, Timeline } from "../dashboard/chart.js";
import { byId, setQuantity, setText } from "../dashboard/dom.js";
import { bits, brief, bytes, joined, percent, shortPrecision, signs } from "../dashboard/format.js";
import { Strip } from "../dashboard/layers.js";
import { PlanForm } from "../dashboard/plan.js";
import { Stream } from "../dashboard/stream.js";

export const ADMIN_KEY = "jaxserve-admin-key"; // in sessionStorage, which this tab's dashboard reads as well
const SHOWN = 90; // seconds in the chart
const RETRY_LOCKED = 403;

/** The panel. `online()` is called whenever the server has been reached again. */
export class Side {
  constructor(online) {
    this.timeline = new Timeline();
    this.strip = new Strip(byId("side-layers"), byId("side-precisions"));
    this.form = new PlanForm(byId("side-plan"), () => this.stream.key);
    this.chart = new Chart(byId("side-chart"), this.timeline, {
      name: "Tokens per second of the server",
      floor: 10,
      series: [{ name: "Generated", class: "main", value: (sample) => sample.generated_tokens_per_s }],
      text: (sample) => `${Math.round(sample.generated_tokens_per_s ?? 0)} tokens/s`,
    });
    this.timeline.onCursor = () => this.chart.draw();
    this.stream = new Stream(new URL("../dashboard/events", import.meta.url), {
      open: () => {
        this.#say("");
        byId("side-key").hidden = true;
        online();
      },
      event: (event, first) => this.#show(event, first),
      locked: () => this.#lock(),
      lost: (error) => this.#lose(error),
    });
    this.stream.key = sessionStorage.getItem(ADMIN_KEY);
    byId("side-key").addEventListener("submit", (event) => {
      event.preventDefault();
      this.stream.key = byId("admin-key").value.trim();
      sessionStorage.setItem(ADMIN_KEY, this.stream.key);
      byId("admin-key").value = "";
      this.stream.start();
    });
    this.stream.start();
  }

  /** Shows the speed of the answer in progress, or of the last one; null: none. */
  answer(rate) {
    setQuantity(byId("side-answer"), rate ? [rate < 9.95 ? rate.toFixed(1) : String(Math.round(rate)), "tokens/s"] : ["–", ""]);
  }

  #show({ status, samples }, first) {
    const { timeline } = this;
    if (first) timeline.samples = [];
    timeline.samples.push(...samples);
    timeline.offset = Date.now() / 1e3 - status.time;
    timeline.to = status.time;
    timeline.from = status.time - SHOWN;
    while (timeline.samples.length && timeline.samples[0].time < timeline.from - 2) timeline.samples.shift();
    byId("side-body").hidden = false;
    this.strip.show(status);
    this.form.show(status);
    this.#showPlan(status);
    setText(byId("side-counts"), counts(status.precisions));
    const sample = timeline.samples.at(-1);
    if (sample) this.#showLoad(sample, status);
    this.chart.draw();
  }

  #showPlan({ policy, plan_version: version, target_version: target, busy, note }) {
    setText(byId("side-policy"), policy);
    setText(byId("side-version"), String(version));
    setText(byId("side-moving"), busy ? `changing to ${target ?? "another"}` : "steady");
    byId("side-moving").className = `badge ${busy ? "warn" : ""}`;
    setText(byId("side-note"), signs(note));
  }

  #showLoad(sample, { kv_pages: { total } }) {
    const rate = sample.generated_tokens_per_s ?? 0;
    setQuantity(byId("side-rate"), [rate < 9.95 && rate > 0 ? rate.toFixed(1) : String(Math.round(rate)), "tokens/s"]);
    setText(byId("side-running"), String(sample.running));
    setText(byId("side-waiting"), String(sample.waiting));
    setQuantity(byId("side-kv"), percent(sample.kv_usage));
    byId("side-kv-bar").style.width = `${sample.kv_usage * 100}%`;
    const cache = brief(bytes(sample.kv_used_bytes + sample.kv_free_bytes));
    setText(byId("side-pages"), `${Math.round(sample.kv_usage * total)} of ${total} pages, ${cache}`);
    setText(byId("side-weights"), joined(bytes(sample.weight_bytes)));
  }

  #say(text) {
    setText(byId("side-said"), text);
    byId("side-message").hidden = text === "";
  }

  /** Asks for the admin key, which the server wants for these data; the conversation goes on without. */
  #lock() {
    const wrong = this.stream.key !== null;
    this.stream.key = null;
    sessionStorage.removeItem(ADMIN_KEY);
    byId("side-body").hidden = true;
    byId("side-key").hidden = false;
    this.#say(wrong ? "The server did not accept this key." : "This server shows its layers to operators only.");
  }

  #lose(error) {
    byId("side-key").hidden = true;
    if (error.status === RETRY_LOCKED) {
      byId("side-body").hidden = true;
      this.stream.stop();
      this.#say("The layers are shown on the server's own machine, or with an admin key (--admin-key).");
    } else if (error.status === 409) {
      this.stream.stop();
      this.#say("This engine's plan does not change, so there are no layers to watch.");
    } else {
      const why = error.status ? error.message : "The server cannot be reached";
      this.#say(`${why.replace(/^./, (letter) => letter.toUpperCase())}. Trying again.`);
    }
  }
}

/** Returns the number of layers of each precision in words. */
function counts(precisions) {
  const names = Object.keys(precisions).sort((a, b) => bits(b) - bits(a));
  return names.map((name) => `${precisions[name]} ${shortPrecision(name)}`).join(", ");
}
