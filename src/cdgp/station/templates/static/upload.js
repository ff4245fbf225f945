"use strict";
/* Uploads files one after the other, and comes back later where the station asks for it. */

const form = document.getElementById("upload");
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

async function uploadOne(file, line, lot) {
  const query = new URLSearchParams({ line, lot, name: file.name });
  for (;;) {
    try {
      return await ask(`/api/v1/images?${query}`, file, { raw: true });
    } catch (error) {
      if (error.status !== 429) throw error;
      await pause(error.later || 5);
    }
  }
}

if (form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const status = document.getElementById("uploaded");
    const button = form.querySelector("button");
    let taken = 0, known = 0;
    const refused = [];
    button.disabled = true;
    for (const file of form.files.files) {
      try {
        const told = await uploadOne(file, form.line.value, form.lot.value);
        if (told.new) taken += 1; else known += 1;
      } catch (error) {
        refused.push(`${file.name}: ${error.message}`);
      }
      status.textContent = `${taken} taken in, ${known} known already, ${refused.length} refused`;
    }
    button.disabled = false;
    showProblem(refused.slice(0, 3).join("; "));
    if (!refused.length) form.files.value = "";
  });
}
