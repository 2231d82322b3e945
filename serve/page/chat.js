"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "thinks", "key"];

let turns = JSON.parse(sessionStorage.getItem("turns") || "[]");
let running = null; // AbortController of the answer under way
let model = "";
let longestAnswer = Infinity; // tokens that the server gives at most
let rank = null; // every turn of this page goes to one replica, which has its prefix cached

function save() {
  sessionStorage.setItem("turns", JSON.stringify(turns));
}

function headers() {
  const key = $("key").value;
  return {
    "Content-Type": "application/json",
    ...(key ? { Authorization: `Bearer ${key}` } : {}),
    ...(rank === null ? {} : { "resin-routed-dp-rank": String(rank) }),
  };
}

function addTurn(turn) {
  const box = document.createElement("article");
  box.className = `turn ${turn.role}`;
  $("turns").append(box);
  drawTurn(box, turn);
  return box;
}

function drawTurn(box, turn) {
  box.replaceChildren();
  if (turn.role === "user") {
    box.textContent = turn.content;
    return;
  }
  if (turn.reasoning) {
    const details = document.createElement("details");
    details.open = !turn.content;
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    const body = document.createElement("div");
    body.className = "reasoning";
    body.textContent = turn.reasoning;
    details.append(summary, body);
    box.append(details);
  }
  const body = document.createElement("div");
  body.className = "answer";
  body.innerHTML = renderMarkup(turn.content);
  box.append(body);
  if (turn.fault) {
    const fault = document.createElement("p");
    fault.className = "fault";
    fault.textContent = turn.fault;
    box.append(fault);
  }
}

function showNumbers(usage, startedMs, firstMs) {
  if (!usage) return;
  const nowMs = performance.now();
  const seconds = (nowMs - startedMs) / 1000;
  const decoding = firstMs === null ? 0 : (nowMs - firstMs) / 1000;
  const speed = decoding > 0 && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / decoding : 0;
  $("numbers").textContent =
    `${usage.prompt_tokens} prompt tokens · ${usage.completion_tokens} generated tokens · ` +
    `${seconds.toFixed(1)} s` + (speed ? ` · ${speed.toFixed(1)} tokens/s` : "");
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function requestBody() {
  const system = $("system").value.trim();
  const history = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  const asked = Number($("max_tokens").value); // empty: what fits
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    ...(asked > 0 ? { max_tokens: Math.min(asked, longestAnswer) } : {}),
    chat_template_kwargs: { enable_thinking: $("thinks").checked },
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

async function answer() {
  const body = requestBody();
  const turn = { role: "assistant", content: "", reasoning: "" };
  turns.push(turn);
  const box = addTurn(turn);
  const startedMs = performance.now();
  let firstMs = null;
  let isDrawPending = false;
  const draw = () => {
    const view = $("turns");
    const follows = view.scrollHeight - view.scrollTop - view.clientHeight < 80;
    drawTurn(box, turn);
    if (follows) view.scrollTop = view.scrollHeight;
    isDrawPending = false;
  };
  running = new AbortController();
  setBusy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of readEvents(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) firstMs ??= performance.now();
      turn.content += delta.content ?? "";
      turn.reasoning += delta.reasoning_content ?? "";
      if (chunk.choices.length) showNumbers(chunk.usage, startedMs, firstMs);
      if (!isDrawPending) {
        isDrawPending = true;
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") turn.fault = error.message;
  }
  running = null;
  setBusy(false);
  draw();
  save();
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

function send() {
  const content = $("message").value.trim();
  if (!content || running) return;
  $("message").value = "";
  const turn = { role: "user", content };
  turns.push(turn);
  save();
  addTurn(turn).scrollIntoView();
  answer();
}

function restoreSettings() {
  const saved = JSON.parse(sessionStorage.getItem("settings") || "{}");
  for (const id of SETTINGS) {
    const field = $(id);
    const name = field.type === "checkbox" ? "checked" : "value";
    if (id in saved) field[name] = saved[id];
    field.addEventListener("change", () => {
      saved[id] = field[name];
      sessionStorage.setItem("settings", JSON.stringify(saved));
    });
  }
}

async function start() {
  restoreSettings();
  turns.forEach(addTurn);
  $("turns").scrollTop = $("turns").scrollHeight;
  const health = await (await fetch("health")).json();
  model = health.model;
  $("model").textContent = model;
  longestAnswer = health.max_output_tokens;
  const kept = Number(sessionStorage.getItem("rank") ?? NaN);
  rank = kept < health.replicas ? kept : Math.floor(Math.random() * health.replicas);
  sessionStorage.setItem("rank", String(rank));
}

window.addEventListener("pagehide", save); // an answer under way keeps what it has

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  save();
  $("turns").replaceChildren();
  $("numbers").textContent = "";
});
start();
