"use strict";
// Without this script the page is whole; it only finds, and shows what belongs together.

const places = [...document.querySelectorAll("[data-find]")].map((element) => ({
  element,
  text: element.textContent.toLowerCase(),
}));
const field = document.getElementById("find");
const found = document.getElementById("found");
const opened = new Set(); // what a search has opened, to be closed with it

function find(words) {
  const wanted = words.trim().toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  document.body.classList.toggle("searching", wanted.length > 0);
  for (const fold of opened) fold.open = false;
  opened.clear();
  for (const { element, text } of places) {
    const matches = wanted.every((word) => text.includes(word));
    element.classList.toggle("miss", !matches);
    element.classList.toggle("hit", matches && wanted.length > 0);
    if (!matches || wanted.length === 0) continue;
    count += 1;
    for (let fold = element.closest("details"); fold; fold = fold.parentElement.closest("details")) {
      if (!fold.open) {
        fold.open = true;
        opened.add(fold);
      }
    }
  }
  found.textContent = wanted.length ? (count === 1 ? "1 place" : `${count} places`) : "";
}

field.addEventListener("input", () => find(field.value));
field.form.addEventListener("submit", (event) => event.preventDefault());

// A link to a step opens what it is folded into; #find=words is a search.
function follow() {
  const fragment = decodeURIComponent(location.hash.slice(1));
  if (fragment.startsWith("find=")) {
    field.value = fragment.slice(5);
    find(field.value);
    return;
  }
  const target = document.getElementById(fragment);
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) {
    fold.open = true;
  }
  target.scrollIntoView({ block: "center" });
}

window.addEventListener("hashchange", follow);
follow();

// All names of one storage light up together.
document.addEventListener("mouseover", (event) => {
  const root = event.target.closest("[data-root]")?.dataset.root;
  for (const element of document.querySelectorAll("code[data-root]")) {
    element.classList.toggle("same", root !== undefined && element.dataset.root === root);
  }
});
