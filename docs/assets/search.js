"use strict";
// Search over KFS_INDEX (see docs/search.py). `page.html#search=words` opens a page with these words searched for.
(() => {
  const box = document.getElementById("search");
  const list = document.getElementById("search-results");
  const status = document.getElementById("search-status");
  const LIMIT = 12;

  // How well one word fits one field: whole name, start of a word, anywhere.
  const fit = (text, word) => {
    const lower = text.toLowerCase();
    if (lower === word || lower.split(".").pop() === word) return 4;
    const at = lower.indexOf(word);
    if (at < 0) return 0;
    return at === 0 || /[^\p{L}\p{N}]/u.test(lower[at - 1]) ? 2 : 1;
  };
  const best = (texts, word) => texts.reduce((most, text) => Math.max(most, fit(text, word)), 0);

  const score = (entry, words) => {
    let total = 0;
    for (const word of words) {
      const found = 8 * fit(entry.title, word) + 6 * best(entry.names, word) + 3 * best(entry.headings, word) + fit(entry.text, word);
      if (!found) return 0;
      total += found;
    }
    return total;
  };

  const hide = () => { list.hidden = true; box.setAttribute("aria-expanded", "false"); };

  const search = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.replaceChildren();
    if (!words.length) { status.textContent = ""; hide(); return; }
    const found = window.KFS_INDEX
      .map((entry) => [score(entry, words), entry])
      .filter(([points]) => points > 0)
      .sort((a, b) => b[0] - a[0] || a[1].title.length - b[1].title.length)
      .slice(0, LIMIT);
    for (const [, entry] of found) {
      const link = document.createElement("a");
      link.href = entry.url;
      const title = document.createElement("strong");
      title.textContent = entry.title;
      const text = document.createElement("span");
      text.textContent = entry.text;
      link.append(title, text);
      const item = document.createElement("li");
      item.append(link);
      list.append(item);
    }
    if (!found.length) {
      const item = document.createElement("li");
      item.textContent = "Nothing found.";
      list.append(item);
    }
    status.textContent = found.length === 1 ? "1 result" : `${found.length} results`;
    list.hidden = false;
    box.setAttribute("aria-expanded", "true");
  };

  const links = () => [...list.querySelectorAll("a")];

  box.addEventListener("input", search);
  box.addEventListener("focus", () => { if (box.value) search(); });
  box.form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (links().length) links()[0].click();
  });
  document.addEventListener("keydown", (event) => {
    const inside = box.form.contains(document.activeElement);
    if (event.key === "/" && !inside) { event.preventDefault(); box.focus(); return; }
    if (!inside) return;
    if (event.key === "Escape") { box.focus(); hide(); return; }
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const places = [box, ...links()];
    const step = event.key === "ArrowDown" ? 1 : places.length - 1;
    places[(Math.max(places.indexOf(document.activeElement), 0) + step) % places.length].focus();
  });
  document.addEventListener("click", (event) => {
    if (!box.form.contains(event.target) || event.target.closest("#search-results a")) hide();
  });

  const fromAddress = () => {
    const wanted = /^#search=(.*)$/.exec(location.hash);
    if (!wanted) return;
    box.value = decodeURIComponent(wanted[1]);
    box.dispatchEvent(new Event("input"));
    box.focus();
  };
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
})();
