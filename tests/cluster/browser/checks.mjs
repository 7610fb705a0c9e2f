// What a page does with a router on another origin. Each check returns what it saw; the test judges.
import OpenAI from "/openai/index.mjs";

const { api, cut } = Object.fromEntries(new URLSearchParams(location.search));
const count = (to) => ({ model: "demo", messages: [{ role: "user", content: `Count from 1 to ${to}.` }], temperature: 0 });
const post = (path, body, headers = {}) =>
  fetch(api + path, { method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body) });
const said = (chunk) => chunk.choices[0]?.delta?.content ?? "";

async function fetched(to, body = {}) {
  const answer = await post("/v1/chat/completions", { ...count(to), stream: true, ...body }, { authorization: "Bearer none", "x-stainless-unheard-of": "1" });
  const lines = (await answer.text()).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
  const chunks = lines.slice(0, -1).map((line) => JSON.parse(line));
  return { status: answer.status, type: answer.headers.get("content-type"), requestId: answer.headers.get("x-request-id"), id: chunks[0].id, text: chunks.map(said).join(""), last: lines.at(-1) };
}

function followed(url) {
  return new Promise((resolve) => {
    const source = new EventSource(url);
    const seen = { opened: 0, errors: 0, ids: [], text: "" };
    const end = () => { source.close(); resolve(seen); };
    source.onopen = () => { seen.opened += 1; };
    source.onerror = () => { seen.errors += 1; if (source.readyState === EventSource.CLOSED) end(); };
    source.onmessage = (event) => {
      if (event.data === "[DONE]") return end();
      seen.ids.push(event.lastEventId);
      seen.text += said(JSON.parse(event.data));
    };
  });
}

function socket(protocol, frames) {
  return new Promise((resolve) => {
    const seen = { protocol: "", text: "", types: [], code: 0 };
    const opened = new WebSocket(api.replace("http", "ws") + "/v1/ws", protocol);
    opened.onopen = () => { seen.protocol = opened.protocol; frames.forEach((frame) => opened.send(JSON.stringify(frame))); };
    opened.onmessage = (event) => {
      const frame = JSON.parse(event.data);
      if (frame.type === "chunk") seen.text += said(frame.chunk);
      else seen.types.push(frame.type);
      if (frame.type === "done" || frame.type === "error") opened.close(1000);
    };
    opened.onclose = (event) => { seen.code = event.code; resolve(seen); };
  });
}

async function official() {
  const client = new OpenAI({ baseURL: `${api}/v1`, apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
  let text = "", response = "";
  for await (const chunk of await client.chat.completions.create({ ...count(12), stream: true })) text += said(chunk);
  for await (const event of await client.responses.create({ model: "demo", input: "Count from 1 to 12.", temperature: 0, stream: true }))
    if (event.type === "response.output_text.delta") response += event.delta;
  const refused = await client.chat.completions.create({ ...count(3), model: "nobody" }).catch((error) => error);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  return { text, response, models, refused: { status: refused.status, code: refused.code, requestID: refused.requestID } };
}

async function refusals() {
  const answers = [await post("/v1/chat/completions", { messages: "no" }), await post("/v1/chat/completions", { model: "demo", messages: [{ role: "user", content: "x".repeat(100_000) }] })];
  return Promise.all(answers.map(async (answer) => ({ status: answer.status, code: (await answer.json()).error.code })));
}

// Begins a long answer, and leaves it after its first part.
async function left(fields) {
  const stop = new AbortController();
  const body = JSON.stringify({ ...count(20), stream: true, ignore_eos: true, ...fields });
  const answer = await fetch(`${api}/v1/chat/completions`, { method: "POST", signal: stop.signal, headers: { "content-type": "application/json" }, body });
  const part = new TextDecoder().decode((await answer.body.getReader().read()).value);
  stop.abort();
  return JSON.parse(part.split("data: ")[1].split("\n")[0]).id;
}

async function events() {
  // An event has at most 128 tokens with their log probabilities, however late it is read.
  const long = { max_tokens: 400, ignore_eos: true, logprobs: true, top_logprobs: 5 };
  const { text } = await fetched(20, long);
  return { text, seen: await followed(`${cut}/v1/generations/${await left(long)}/events`) };
}

const cancelled = async () => (await fetch(`${api}/v1/generations/${await left({ max_tokens: 1500 })}`, { method: "DELETE" })).status;

const submit = { type: "submit", id: "1", url: "/v1/chat/completions", body: count(12) };
const checks = {
  fetch: () => fetched(12),
  events,
  socket: () => socket("ryzanstein.v1", [submit]),
  wrongSocket: () => socket("another.v1", [submit]),
  openai: official,
  refusals,
  cancelled,
  // A form could send it too: no preflight asks whether it may.
  blind: async () => (await fetch(`${api}/v1/chat/completions`, { method: "POST", mode: "no-cors", headers: { "content-type": "text/plain" }, body: JSON.stringify(count(3)) })).type,
  models: async () => (await fetch(`${api}/v1/models`)).status,
};

const report = {};
for (const [name, check] of Object.entries(checks)) report[name] = await check().catch((error) => ({ failed: `${error.name}: ${error.message}` }));
await fetch("/report", { method: "POST", body: JSON.stringify(report) });
