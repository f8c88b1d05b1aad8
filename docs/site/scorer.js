// The order of search results: attention itself first, then the reference, then the guides, then the inside.
const INSIDE =
  /^(docs\/(site\/|architecture|cpu-|cuda-|files|performance)|benchmarks|simulators|CHANGELOG|CONTRIBUTING)/;

function shift(page, anchor) {
  if (anchor.startsWith("#selfattn_ext.scaled_dot_product_attention")) return 300;
  if (page.startsWith("docs/reference/")) return 200;
  return INSIDE.test(page) ? -200 : 0;
}

var Scorer = {
  score: ([page, title, anchor, description, score]) => score + shift(page, anchor),

  // What Sphinx has where there is no such file.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
