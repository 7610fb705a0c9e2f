// The tab's socket: it comes back by itself, and pairs calls with their replies.

const LOGGED_OUT = 4401;
const FULL = 4429;
const PATIENCE_MS = 5000;
const ASK_MS = 8000; // so long without a message, and the page asks whether the console is there
const GONE_MS = 20000;

export class Socket {
  /**
   * `on` has functions for kinds of messages, and `state`, which is told how the connection is.
   * @param {Record<string, (message: any) => void>} on
   */
  constructor(on) {
    this.on = on;
    /** @type {Map<number, {resolve: (reply: any) => void, reject: (why: Error) => void}>} */
    this.calls = new Map();
    /** @type {(() => void)[]} */
    this.opening = [];
    /** @type {WebSocket | null} */
    this.socket = null;
    this.out = false;
    this.timer = 0;
    this.number = 0;
    this.wait = 250;
    this.heard = 0;
    setInterval(() => this.look(), 2000);
    addEventListener("online", () => this.again()); // the old connection is that of another network
  }

  connect() {
    const url = new URL("socket", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    this.out = false;
    clearTimeout(this.timer);
    const socket = new WebSocket(url);
    this.socket = socket;
    this.heard = Date.now();
    socket.onmessage = ({ data }) => {
      this.heard = Date.now();
      if (socket === this.socket) this.take(JSON.parse(data));
    };
    socket.onclose = ({ code }) => {
      if (socket === this.socket) this.lost(code);
    };
  }

  /** Leaves a connection on which nothing comes any more: a network that goes away says nothing. */
  look() {
    if (!this.ready) return;
    const silent = Date.now() - this.heard;
    if (silent > GONE_MS) this.again();
    else if (silent > ASK_MS) this.tell({ t: "ping" });
  }

  /** Connects anew, at once. */
  again() {
    if (!this.socket || this.out) return;
    const old = this.socket;
    this.socket = null;
    old.close();
    this.lost(0);
    this.connect();
  }

  get ready() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /**
   * Sends a message, or drops it while there is no connection: whoever connects again asks for all of it.
   * @param {Record<string, unknown>} message
   */
  tell(message) {
    if (this.ready) this.socket?.send(JSON.stringify(message));
  }

  /** Resolves when there is a connection, and rejects if there is none for too long. @returns {Promise<void>} */
  opened() {
    if (this.ready) return Promise.resolve();
    return new Promise((resolve, reject) => {
      this.opening.push(resolve);
      setTimeout(() => reject(new Error("the console is not reachable")), PATIENCE_MS);
    });
  }

  /**
   * Sends a message, and resolves to its reply. Rejects with what the console says, or when the connection is lost.
   * @param {Record<string, unknown>} message
   * @returns {Promise<any>}
   */
  async call(message) {
    await this.opened();
    const call = ++this.number;
    return new Promise((resolve, reject) => {
      this.calls.set(call, { resolve, reject });
      this.tell({ ...message, call });
    });
  }

  /** @param {any} message */
  take(message) {
    if (message.t === "welcome") {
      this.wait = 250;
      this.on.state("connected");
      for (const resolve of this.opening.splice(0)) resolve();
    }
    if (message.t === "reply") {
      const waiting = this.calls.get(message.call);
      this.calls.delete(message.call);
      if (message.error && waiting) waiting.reject(new Error(message.error));
      else if (message.error) this.on.failed(message.error);
      else waiting?.resolve(message);
      return;
    }
    this.on[message.t]?.(message);
  }

  /** @param {number} code */
  lost(code) {
    for (const { reject } of this.calls.values()) reject(new Error("the connection to the console was lost"));
    this.calls.clear();
    if (code === LOGGED_OUT) {
      this.out = true;
      this.on.state("logged out");
      return;
    }
    this.on.state(code === FULL ? "too many tabs are open; trying again" : "the console is not reachable; trying again");
    this.timer = setTimeout(() => this.connect(), this.wait * (0.5 + Math.random()));
    this.wait = Math.min(5000, this.wait * 2);
  }
}
