"use strict";
// The turns of a conversation: what is kept of them, what is sent again, and how they look.

// A turn is {role, content}; an answer has reasoning, fault (why it failed) and note (what else there is to say) as well.
let turns = JSON.parse(sessionStorage.getItem("turns") || "[]");

function saveTurns() {
  sessionStorage.setItem("turns", JSON.stringify(turns));
}

// The messages of a request: questions that have an answer, their answers, and the question that ends the list. What was
// refused or stopped before its first word is left out, so that it cannot spoil what follows.
function historyOf(list) {
  const sent = [];
  list.forEach((turn, index) => {
    if (turn.role !== "user") return;
    const next = list[index + 1];
    const isAnswered = next?.role === "assistant" && next.content;
    if (next && !isAnswered) return;
    sent.push({ role: "user", content: turn.content });
    if (isAnswered) sent.push({ role: "assistant", content: next.content });
  });
  return sent;
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function action(name, label, act) {
  const button = element("button", name, label);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages of plain http addresses have no clipboard of their own.
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1200);
}

function drawQuestion(box, turn, acts) {
  const actions = element("div", "actions");
  actions.append(action("edit", "Edit", acts.edit), action("copy", "Copy", (button) => copyText(turn.content, button)));
  box.append(element("div", "text", turn.content), actions);
}

function drawAnswer(box, turn, acts, isRunning) {
  if (turn.reasoning) {
    const details = element("details");
    details.open = !turn.content;
    details.append(element("summary", "", "Reasoning"), element("div", "reasoning", turn.reasoning));
    box.append(details);
  }
  const body = element("div", isRunning && !turn.content ? "answer waiting" : "answer");
  body.innerHTML = renderMarkup(turn.content);
  box.append(body);
  if (turn.fault) box.append(element("p", "fault", turn.fault));
  if (turn.note) box.append(element("p", "note", turn.note));
  if (isRunning) return;
  for (const block of body.querySelectorAll("pre")) {
    const code = block.querySelector("code").textContent;
    block.append(action("copy", "Copy", (button) => copyText(code, button)));
  }
  const actions = element("div", "actions");
  if (turn.content) actions.append(action("copy", "Copy", (button) => copyText(turn.content, button)));
  actions.append(action("retry", "Retry", acts.retry));
  box.append(actions);
}

function drawTurn(box, turn, acts, isRunning) {
  box.replaceChildren();
  if (turn.role === "user") drawQuestion(box, turn, acts);
  else drawAnswer(box, turn, acts, isRunning);
}
