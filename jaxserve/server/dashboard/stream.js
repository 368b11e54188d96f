// The server's events over fetch: EventSource cannot send a key.

const SILENCE = 6000; // ms without an event: the connection is dead, whatever it says
const FIRST_DELAY = 1000;
const LONGEST_DELAY = 15000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Reads events until told to stop, and connects again whenever the connection ends.
 *
 * on.open(), on.event(event, first), on.lost(error, delay): the next try is in `delay` ms;
 * on.locked(error): the key is missing or wrong, and nothing more is tried.
 */
export class Stream {
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.key = null;
    this.run = 0; // a number per start: what belongs to an older one is over
  }

  /** Connects now, in place of whatever was going on. */
  start() {
    this.stop();
    this.delay = FIRST_DELAY;
    this.#connect(this.run);
  }

  stop() {
    this.run += 1;
    this.abort?.abort();
    clearTimeout(this.timer);
  }

  async #connect(run) {
    const abort = (this.abort = new AbortController());
    try {
      await this.#read(run, abort);
      throw new Error("the server ended the connection");
    } catch (error) {
      if (run !== this.run) return;
      if (error.status === 401) return this.on.locked(error);
      const delay = this.delay;
      this.delay = Math.min(LONGEST_DELAY, delay * 2);
      this.timer = setTimeout(() => this.#connect(run), delay);
      this.on.lost(error, delay);
    }
  }

  /** A mistake in showing an event is no reason to connect again. */
  #tell(event, first) {
    try {
      if (first) this.on.open();
      this.on.event(event, first);
    } catch (error) {
      reportError(error);
    }
  }

  async #read(run, abort) {
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(new Error("the server has fallen silent")), SILENCE);
    };
    heard();
    try {
      const response = await fetch(this.url, {
        headers: this.key ? { authorization: `Bearer ${utf8(this.key)}` } : {},
        cache: "no-store",
        signal: abort.signal,
      });
      if (!response.ok) throw await refusal(response);
      let first = true;
      for await (const event of events(response.body)) {
        if (run !== this.run) return;
        heard();
        if (event.error) throw new Refused(0, event.error.message);
        this.delay = FIRST_DELAY;
        this.#tell(event, first);
        first = false;
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }
}

/** The JSON values of a stream of server-sent events, until "[DONE]". */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our errors: the status must do
  }
  return new Refused(response.status, message);
}

/** Headers hold bytes: those of the text in UTF-8, each as a character. */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
