"use strict";
/* The viewer of one image, and the queue around it: made for a hand that stays on the keys. */

const VERDICTS = { g: "good", d: "defective", u: "unsure" };
const AHEAD = 3, FEW = 8, COUNT = 40, AGAIN = 4000, RENEW = 120000;
const figure = document.getElementById("single");
const view = { heat: true, boxes: false, bare: false, opacity: 0.7, full: false };
let shown = null; // the image that the viewer holds

/* --- one image --- */

function layers() {
  const part = (name) => figure.querySelector(name);
  return { base: part(".base"), heat: part(".heat"), boxes: part(".boxes"), stage: part(".stage"), box: part(".layers") };
}

function source(image, full) {
  return `/images/${image.id}/${full ? "full" : "view"}.jpg`;
}

function fit() {
  const { stage, box } = layers();
  const room = Math.min(stage.clientWidth / shown.width, stage.clientHeight / shown.height);
  const factor = view.full ? 1 : room;
  box.style.width = `${shown.width * factor}px`;
  box.style.height = `${shown.height * factor}px`;
}

function drawBoxes(svg, image) {
  svg.setAttribute("viewBox", `0 0 ${image.width} ${image.height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...image.boxes.flatMap(([x, y, width, height]) =>
    ["rim", ""].map((kind) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      Object.entries({ x, y, width, height }).forEach(([key, value]) => rect.setAttribute(key, value));
      if (kind) rect.setAttribute("class", kind);
      return rect;
    })));
}

function restyle() {
  const { heat, boxes } = layers();
  heat.style.opacity = view.opacity;
  heat.classList.toggle("off", view.bare || !view.heat || !shown.heat);
  boxes.classList.toggle("off", view.bare || !view.boxes);
  canvas().classList.toggle("off", view.bare);
}

/* The zoom and the place in the image stay from one image to the next. */
function draw(image) {
  const { base, heat, boxes, stage } = layers();
  const place = [stage.scrollLeft, stage.scrollTop];
  if (shown !== image) leaveDrawing();
  shown = image;
  base.src = source(image, view.full);
  base.alt = `Image ${image.id}`;
  if (image.heat) heat.src = `/images/${image.id}/${image.heat}`;
  else heat.removeAttribute("src");
  drawBoxes(boxes, image);
  fit();
  paint();
  restyle();
  stage.scrollTo(...place);
}

function viewerKey(key) {
  if (key === "h") view.heat = !view.heat;
  else if (key === "b") view.boxes = !view.boxes;
  else if (key === "[") view.opacity = Math.max(0, view.opacity - 0.1);
  else if (key === "]") view.opacity = Math.min(1, view.opacity + 0.1);
  else if (key === " ") view.bare = true;
  else if (key === "1") {
    view.full = !view.full;
    if (shown) layers().base.src = source(shown, view.full);
    if (shown) fit();
  } else return false;
  if (shown) restyle();
  return true;
}

/* --- the queue --- */

const queue = document.getElementById("queue");
const grid = document.getElementById("grid");
const state = { items: [], at: 0, selected: new Set(), single: false, saving: 0, saved: 0, depth: 0, busy: [] };

function current() {
  return state.items[state.at];
}

async function fill() {
  try {
    const told = await ask("/api/v1/queue/claim", { line: Number(queue.dataset.line), of: queue.dataset.of, count: COUNT });
    const known = new Set(state.items.map((image) => image.id));
    const busy = new Set(state.busy);
    state.items.push(...told.images.filter((image) => !known.has(image.id) && !busy.has(image.id)));
    state.depth = told.depth;
    render();
  } catch (error) {
    showProblem(error.status ? error.message : "The station does not answer.");
  }
}

function tile(image, index) {
  const made = document.createElement("div");
  made.className = "tile";
  made.setAttribute("role", "option");
  made.tabIndex = -1;
  const picture = document.createElement("img");
  picture.src = `/images/${image.id}/thumbnail.jpg`;
  picture.alt = `Image ${image.id}`;
  const caption = document.createElement("span");
  caption.textContent = image.part || image.label || `image ${image.id}`;
  made.append(picture, caption);
  made.addEventListener("click", () => {
    state.at = state.items.indexOf(image);
    render();
  });
  made.addEventListener("dblclick", () => press("Enter"));
  return made;
}

const tiles = new Map(); // by image id, so that a verdict redraws nothing that stays

function render() {
  state.at = Math.max(0, Math.min(state.at, state.items.length - 1));
  const empty = !state.items.length;
  document.getElementById("empty").hidden = !empty;
  grid.hidden = empty || state.single;
  figure.hidden = empty || !state.single;
  const waiting = Math.max(state.depth, state.items.length);
  document.getElementById("depth").textContent = `${waiting} to review`;
  document.getElementById("saved").textContent = [
    state.saving ? `saving ${state.saving}` : state.saved ? `${state.saved} saved ✓` : "",
    state.selected.size ? `${state.selected.size} selected` : "",
  ].filter(Boolean).join(", ");
  const ids = new Set(state.items.map((image) => image.id));
  for (const [id, made] of tiles) if (!ids.has(id)) { made.remove(); tiles.delete(id); }
  state.items.forEach((image, index) => {
    if (!tiles.has(image.id)) tiles.set(image.id, tile(image));
    const made = tiles.get(image.id);
    if (grid.children[index] !== made) grid.insertBefore(made, grid.children[index] || null);
    made.classList.toggle("current", index === state.at);
    made.setAttribute("aria-selected", state.selected.has(image.id));
  });
  if (empty) return;
  if (state.single) {
    draw(current());
    const { id, part, lot, label } = current();
    figure.querySelector("figcaption").textContent =
      [`image ${id}`, part && `part ${part}`, lot && `lot ${lot}`, label].filter(Boolean).join(" · ");
    for (const image of state.items.slice(state.at + 1, state.at + 1 + AHEAD)) {
      new Image().src = source(image, view.full);
      if (image.heat) new Image().src = `/images/${image.id}/${image.heat}`;
    }
  } else {
    tiles.get(current().id).scrollIntoView({ block: "nearest" });
  }
}

/* Verdicts reach the station in the order of the keys, so that undo takes back the last one. */
let sending = Promise.resolve();
function inOrder(work) {
  sending = sending.then(work);
  return sending;
}

/* The next image is drawn at once; what the station refuses comes back with a message. */
function verdict(name) {
  const some = state.selected.size
    ? state.items.filter((image) => state.selected.has(image.id))
    : current() ? [current()] : [];
  if (!some.length) return;
  saveDrawing();
  const ids = some.map((image) => image.id);
  const place = state.at;
  state.items = state.items.filter((image) => !ids.includes(image.id));
  state.selected.clear();
  state.busy.push(...ids);
  state.saving += some.length;
  state.depth -= some.length;
  showProblem("");
  render();
  inOrder(() => save(name, some, ids, place));
}

async function save(name, some, ids, place) {
  try {
    await ask("/api/v1/reviews", { verdict: name, images: some.map(({ id, version }) => ({ id, version })) });
    state.saved += some.length;
  } catch (error) {
    const lost = new Set(error.images);
    state.items.splice(place, 0, ...some.filter((image) => !lost.has(image.id)));
    state.depth += some.length - lost.size;
    const which = lost.size ? `Image ${[...lost].join(", ")}: ` : "";
    showProblem(`Not saved. ${which}${error.status ? error.message : "the station does not answer; try again"}`);
  }
  state.busy = state.busy.filter((id) => !ids.includes(id));
  state.saving -= some.length;
  if (state.items.length < FEW) await fill();
  render();
}

async function undo() {
  try {
    const told = await ask("/api/v1/reviews/undo", {});
    const versions = Object.entries(told.versions).map(([id, version]) => [Number(id), version]);
    state.saved = Math.max(0, state.saved - versions.length);
    const before = new Set(state.items.map((image) => image.id));
    await fill();
    const back = state.items.filter((image) => !before.has(image.id) && versions.some(([id]) => id === image.id));
    state.items = [...back, ...state.items.filter((image) => !back.includes(image))];
    state.at = 0;
    showProblem("");
    render();
  } catch (error) {
    showProblem(error.status ? error.message : "The station does not answer.");
  }
}

function move(step) {
  state.at += step;
  render();
}

function press(key) {
  if (state.single && drawingKey(key)) return true;
  if (VERDICTS[key]) verdict(VERDICTS[key]);
  else if (key === "z") inOrder(undo);
  else if (key === "j" || key === "ArrowRight") move(1);
  else if (key === "k" || key === "ArrowLeft") move(-1);
  else if (key === "Enter" || key === "Escape") {
    state.single = key === "Enter" && !state.single;
    useTool(null);
    render();
  }
  else if (key === "?") document.getElementById("help").showModal();
  else if (key === "x" && current()) {
    if (!state.selected.delete(current().id)) state.selected.add(current().id);
    render();
  } else if (key === "X") {
    const all = state.selected.size === state.items.length;
    state.selected = new Set(all ? [] : state.items.map((image) => image.id));
    render();
  } else return viewerKey(key);
  return true;
}

/* --- the page of one image --- */

async function pageVerdict(key) {
  const { image, version } = figure.dataset;
  saveDrawing();
  await sending;
  try {
    if (key === "z") await ask("/api/v1/reviews/undo", {});
    else await ask("/api/v1/reviews", { verdict: VERDICTS[key], images: [{ id: Number(image), version: Number(version) }] });
    window.location.reload();
  } catch (error) {
    showProblem(`Not saved. ${error.status ? error.message : "The station does not answer; try again."}`);
  }
}

function pageKey(key) {
  if (drawingKey(key)) return true;
  if (figure.dataset.version && (VERDICTS[key] || key === "z")) pageVerdict(key);
  else return viewerKey(key);
  return true;
}

/* --- what begins it --- */

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea, dialog[open]");
  const onButton = event.target.closest("button, a") && (event.key === "Enter" || event.key === " ");
  if (typing || onButton || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key === "X" && event.shiftKey ? "X" : event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (queue ? press(key) : figure && pageKey(key)) event.preventDefault();
});
document.addEventListener("keyup", (event) => {
  if (event.key === " " && view.bare) {
    view.bare = false;
    if (shown) restyle();
  }
});
window.addEventListener("resize", () => { if (shown && !figure.hidden) fit(); });

document.querySelectorAll("[data-key]").forEach((button) =>
  button.addEventListener("click", () => (queue ? press : pageKey)(button.dataset.key)));

if (queue) {
  fill();
  setInterval(() => { if (!state.items.length && !state.saving) fill(); }, AGAIN);
  setInterval(() => { if (state.items.length) fill(); }, RENEW);
} else if (figure) {
  const { image, heat, boxes, drawing, width, height } = figure.dataset;
  draw({ id: Number(image), heat: heat || null, boxes: JSON.parse(boxes), drawing: JSON.parse(drawing), width: Number(width), height: Number(height) });
}
