/* The order of search results; docs/search.py fills in the points. Sphinx calls score() for each result. */

const KFS_POINTS = /* points */ {};

/* Kinds of pages, by the start of their names: what most readers look for is worth most. */
const KFS_KINDS = [
  ["docs/howto_", 200],
  ["docs/which_kfac", 200],
  ["docs/gpu", 200],
  ["docs/options_kfac", 150],
  ["docs/api/", 50],
  ["docs/", 100],
  ["README", 100],
  ["kfs/", 0],
  ["", -50],
];

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").trim();
    let sum = score + KFS_KINDS.find(([start]) => docname.startsWith(start))[1];
    if (docname.startsWith("docs/api/")) {
      /* Whoever writes a name as code does (KFAC, plot_spectrum, kfs.load) looks for its page. */
      const name = query.replace(/\(.*$/, "");
      const named = title === name || title.endsWith("." + name);
      return sum + (named ? 40 : 0) + (named && /[A-Z._]/.test(name) ? 500 : 0);
    }
    if (!docname.startsWith("docs/")) return sum;
    /* A page and its sections are results of their own. All have the points of the page. */
    const stemmer = new Stemmer();
    const stems = (text) => splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
    const asked = stems(query);
    for (const word of asked) {
      const pages = KFS_POINTS.hasOwnProperty(word) ? KFS_POINTS[word] : {};
      sum += pages[docname] || 0;
    }
    const titled = new Set(stems(title.split(" > ")[0]));
    return sum + (asked.every((word) => titled.has(word)) ? 120 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  /* Less than Sphinx's: words of titles have points already. */
  title: 6,
  partialTitle: 3,
  term: 5,
  partialTerm: 2,
};
