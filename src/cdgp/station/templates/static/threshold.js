"use strict";
/* A slider and a number for each threshold: each follows the other. */

for (const slider of document.querySelectorAll("input[data-of]")) {
  const number = document.querySelector(`input[name=${slider.dataset.of}]`);
  slider.addEventListener("input", () => { number.value = slider.value; });
  number.addEventListener("input", () => { slider.value = number.value; });
}
