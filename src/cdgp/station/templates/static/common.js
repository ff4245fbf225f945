"use strict";
/* Shared by all pages: requests that carry the CSRF token, and one place for what goes wrong. */

function showProblem(text) {
  document.getElementById("problem").textContent = text;
}

/* The answer as an object; an Error with `status` and `images` where the station refuses. */
async function ask(path, body, options = {}) {
  const csrf = document.querySelector("meta[name=csrf]");
  const headers = { "X-CSRF-Token": csrf ? csrf.content : "" };
  if (!options.raw) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: "POST", headers, body: options.raw ? body : JSON.stringify(body), keepalive: Boolean(options.keepalive),
  });
  if (answer.status === 401) window.location.assign("/login");
  const told = await answer.json().catch(() => ({ detail: `the station answers ${answer.status}` }));
  if (!answer.ok) {
    const error = new Error(told.detail);
    error.status = answer.status;
    error.images = told.images || [];
    error.later = Number(answer.headers.get("Retry-After") || 0);
    throw error;
  }
  return told;
}

document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) showProblem("");
});
document.addEventListener("htmx:sendError", () => showProblem("The station does not answer."));
