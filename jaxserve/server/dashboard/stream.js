// Server-sent events over fetch, because EventSource cannot send a key.

const MAX_SILENCE = 6000; // ms without an event after which the connection counts as dead
const MIN_DELAY = 1000; // ms before the first new attempt
const MAX_DELAY = 15000; // ms

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Reads events until `stop`, and connects again whenever the connection ends.
 *
 * Calls on.open() and on.event(event, first); on.lost(error, delay) if the next attempt is in `delay` ms; and
 * on.locked(error) if the key is missing or wrong, after which there is no further attempt.
 */
export class Stream {
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.key = null;
    this.run = 0; // counts starts, so that callbacks of an earlier one are ignored
  }

  /** Connects now, and ends the current connection or wait. */
  start() {
    this.stop();
    this.delay = MIN_DELAY;
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
      this.delay = Math.min(MAX_DELAY, delay * 2);
      this.timer = setTimeout(() => this.#connect(run), delay);
      this.on.lost(error, delay);
    }
  }

  /** Passes an event on. An error in showing it is reported, but does not end the connection. */
  #dispatch(event, first) {
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
      timer = setTimeout(() => abort.abort(new Error("the server has fallen silent")), MAX_SILENCE);
    };
    heard();
    try {
      const response = await fetch(this.url, {
        headers: authorization(this.key),
        cache: "no-store",
        signal: abort.signal,
      });
      if (!response.ok) throw await refusal(response);
      let first = true;
      for await (const event of events(response.body)) {
        if (run !== this.run) return;
        heard();
        if (event.error) throw new Refused(0, event.error.message);
        this.delay = MIN_DELAY;
        this.#dispatch(event, first);
        first = false;
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }
}

/** Yields the JSON values of a stream of server-sent events. Returns whether it was complete: it ended with "[DONE]". */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith(":")) continue; // a comment, which keeps the connection alive
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return true;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Returns the error that a response other than 2xx stands for, with the words of the server. */
export async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an error of jaxserve: the message has only the status.
  }
  return new Refused(response.status, message);
}

/** Returns the header that sends a key, none without one. */
export const authorization = (key) => (key ? { authorization: `Bearer ${utf8(key)}` } : {});

/** Returns a text as a header value: each byte of its UTF-8 form as one character. */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
