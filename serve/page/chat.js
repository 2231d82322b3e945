"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "thinks", "key"];
const HINT = "Enter sends, Shift+Enter starts a line";
const SUGGESTIONS = [
  "Explain what a hash table is to a ten-year-old.",
  "Write a Python function that reverses a string.",
  "What is the capital of France?",
];

let running = null; // AbortController of the answer under way
let server = {}; // what /health says: the model, its context, what it can do
let rank = null; // every turn of this page goes to one replica, which has its prefix cached
let editing = null; // index of the question that the next message replaces

function headers() {
  const key = $("key").value;
  return {
    "Content-Type": "application/json",
    ...(key ? { Authorization: `Bearer ${key}` } : {}),
    ...(rank === null ? {} : { "resin-routed-dp-rank": String(rank) }),
  };
}

function drawTurns() {
  $("turns").replaceChildren();
  turns.forEach(addTurn);
  $("turns").scrollTop = $("turns").scrollHeight;
  $("welcome").hidden = turns.length > 0;
}

function addTurn(turn) {
  const box = element("article", `turn ${turn.role}`);
  $("turns").append(box);
  redraw(box, turn, false);
  return box;
}

function redraw(box, turn, isRunning) {
  drawTurn(box, turn, { edit: () => edit(turn), retry: () => retry(turn) }, isRunning);
}

function say(text) {
  $("numbers").textContent = text;
}

function showNumbers(usage, startedMs, firstMs) {
  if (!usage) return;
  const nowMs = performance.now();
  const seconds = (nowMs - startedMs) / 1000;
  const decoding = firstMs === null ? 0 : (nowMs - firstMs) / 1000;
  const speed = decoding > 0 && usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / decoding : 0;
  say(
    `${usage.prompt_tokens} prompt tokens · ${usage.completion_tokens} generated tokens · ` +
      `${seconds.toFixed(1)} s` + (speed ? ` · ${speed.toFixed(1)} tokens/s` : ""),
  );
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

function requestBody(history) {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? {} : { [id]: Number($(id).value) }); // empty: the server's default
  const asked = Number($("max_tokens").value) || server.answer_tokens;
  return {
    model: server.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    ...number("temperature"),
    ...number("top_p"),
    max_tokens: Math.min(asked, server.max_output_tokens),
    ...(server.thinking ? { chat_template_kwargs: { enable_thinking: $("thinks").checked } } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

// Asks, and asks again without the oldest question while the conversation is longer than the context.
async function ask(turn, signal) {
  const history = historyOf(turns.slice(0, -1));
  let isCut = false;
  for (;;) {
    const body = JSON.stringify(requestBody(history));
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal });
    if (response.ok) {
      if (isCut) turn.note = "The oldest messages no longer fit the context and were left out.";
      return response;
    }
    const { error } = await response.json();
    if (error.code !== "context_length_exceeded" || history.length < 3) {
      if (response.status === 401) $("settings").open = true;
      throw new Error(error.message);
    }
    history.splice(0, 2);
    isCut = true;
  }
}

async function answer() {
  const turn = { role: "assistant", content: "", reasoning: "" };
  turns.push(turn);
  const box = addTurn(turn);
  const startedMs = performance.now();
  let firstMs = null;
  let isDrawPending = false;
  const draw = () => {
    const view = $("turns");
    const follows = view.scrollHeight - view.scrollTop - view.clientHeight < 80;
    redraw(box, turn, running !== null);
    if (follows) view.scrollTop = view.scrollHeight;
    isDrawPending = false;
  };
  running = new AbortController();
  setBusy(true);
  say("");
  draw();
  try {
    for await (const chunk of readEvents(await ask(turn, running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const delta = choice?.delta ?? {};
      if (delta.content || delta.reasoning_content) firstMs ??= performance.now();
      turn.content += delta.content ?? "";
      turn.reasoning += delta.reasoning_content ?? "";
      if (choice?.finish_reason === "length") turn.note = "The answer was cut here: no more tokens were allowed or fit.";
      if (choice) showNumbers(chunk.usage, startedMs, firstMs);
      if (!isDrawPending) {
        isDrawPending = true;
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      turn.fault = error instanceof TypeError ? "The server cannot be reached." : error.message;
      say(""); // the numbers of an answer that failed mislead
    }
  }
  running = null;
  setBusy(false);
  draw();
  if (turn.fault) $("turns").scrollTop = $("turns").scrollHeight;
  saveTurns();
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

function send() {
  const content = $("message").value.trim();
  if (!content || running || server.chat === false) return;
  if (editing !== null) turns = turns.slice(0, editing);
  finishEditing();
  $("message").value = "";
  turns.push({ role: "user", content });
  saveTurns();
  drawTurns();
  answer();
}

function edit(turn) {
  if (running) return;
  editing = turns.indexOf(turn);
  $("editing").hidden = false;
  $("message").value = turn.content;
  $("message").focus();
}

function finishEditing() {
  editing = null;
  $("editing").hidden = true;
}

function retry(turn) {
  if (running) return;
  turns = turns.slice(0, turns.indexOf(turn));
  finishEditing();
  drawTurns();
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

// Offers what this model and this context can do, and says so.
function describeServer() {
  $("model").textContent = server.model;
  $("model").title = server.model;
  $("temperature").placeholder = server.sampling.temperature;
  $("top_p").placeholder = server.sampling.top_p;
  $("max_tokens").max = server.max_output_tokens;
  $("max_tokens").placeholder = `${server.answer_tokens}, at most ${server.max_output_tokens}`;
  $("thinking").hidden = !server.thinking;
  const context = `${server.context_length.toLocaleString("en")} tokens of context, messages and answers together`;
  $("greeting").textContent = server.chat
    ? `Ask ${server.model} something. It has ${context}, and may be wrong.`
    : `${server.model} has no chat format: it continues texts, over /v1/completions.`;
  for (const id of ["message", "send"]) $(id).disabled = !server.chat;
  $("suggestions").replaceChildren(
    ...(server.chat ? SUGGESTIONS : []).map((text) =>
      action("suggestion", text, () => {
        $("message").value = text;
        $("message").focus();
      }),
    ),
  );
}

async function start() {
  restoreSettings();
  drawTurns();
  try {
    server = await (await fetch("health")).json();
  } catch {
    $("greeting").textContent = "The server cannot be reached. Reload the page once it runs.";
    return;
  }
  describeServer();
  const kept = Number(sessionStorage.getItem("rank") ?? NaN);
  rank = kept < server.replicas ? kept : Math.floor(Math.random() * server.replicas);
  sessionStorage.setItem("rank", String(rank));
}

window.addEventListener("pagehide", saveTurns); // an answer under way keeps what it has

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("pointerdown", (event) => {
  if (!$("settings").contains(event.target)) $("settings").open = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("settings").open = false;
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("keep").addEventListener("click", () => {
  finishEditing();
  $("message").value = "";
});
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  finishEditing();
  saveTurns();
  drawTurns();
  say(HINT);
});
start();
