// Walks over rows of keys or values in the order in which they are read, and the same some way ahead: what
// memory is asked for before it is used.
//
// Between memory and a core only so much is under way at once. If every row that is used makes room for one
// that will be, that much is under way all the time, also where one block ends and another begins, from page
// to page and from keys to values.
#pragma once

#include "key_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Neighbouring keys, or values, of one kv head or of several: then all heads' rows of one key, and of the
// next. They lie page after page; without pages all is one.
struct RowSpan {
  const char* const* pages;  // where the rows of head 0 begin
  int64_t page_keys, first;  // that a page holds; where in the first page the span begins
  int64_t keys;
  int64_t key_step, head_step;  // bytes
  int64_t head = 0, heads = 1;  // the first, and how many

  RowSpan of_heads(int64_t count) const {
    RowSpan span = *this;
    span.heads = count;
    return span;
  }
};

// The pages that hold keys begin .. end - 1 of a view of keys or values.
class PageList {
 public:
  static int64_t most_pages(const AttentionParams& p, int64_t keys) {
    return p.pages.table != nullptr ? keys / p.pages.size + 2 : 1;
  }
  // `pages` has room for most_pages.
  PageList(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head, int64_t begin,
           int64_t end, const char** pages)
      : pages_(pages),
        page_keys_(p.pages.table != nullptr ? p.pages.size : INT64_MAX),
        first_key_(begin / page_keys_ * page_keys_),
        key_step_(view.stride[2] * size_of(p.dtype)),
        head_step_(view.stride[1] * size_of(p.dtype)) {
    if (p.pages.table == nullptr) {
      *pages = at(p, view, view.offset(batch, kv_head, 0));
      return;
    }
    const int64_t first = begin / page_keys_;
    for (int64_t i = first; i * page_keys_ < end; ++i) {
      pages[i - first] = at(p, view, offset_of_page(view, p.pages, batch, kv_head, i));
    }
  }

  RowSpan span(int64_t key, int64_t keys) const {
    const int64_t at = key - first_key_;
    return {pages_ + at / page_keys_, page_keys_, at % page_keys_, keys, key_step_, head_step_};
  }

 private:
  static const char* at(const AttentionParams& p, const View& view, int64_t offset) {
    return static_cast<const char*>(element(view.data, p.dtype, offset));
  }

  const char* const* pages_;
  int64_t page_keys_, first_key_, key_step_, head_step_;
};

// Runs of the rows of one span and then of another; after them the last row for ever.
class RowRuns {
 public:
  RowRuns(const RowSpan& span, const RowSpan& then) : span_(span), then_(then) {}

  RowRun next() {
    if (span_.keys == 0) {
      if (then_.keys == 0) return {last_, INT64_MAX, 0};
      span_ = then_;
      then_.keys = 0;
    }
    const char* key = *span_.pages + span_.head * span_.head_step + span_.first * span_.key_step;
    const int64_t in_page = span_.page_keys - span_.first;
    // With several heads rows go on evenly spaced beyond a key if there are no others between them.
    const bool gaps = span_.heads > 1 && span_.key_step != span_.heads * span_.head_step;
    const int64_t taken = gaps ? 1 : (in_page < span_.keys ? in_page : span_.keys);
    span_.keys -= taken;
    span_.first += taken;
    if (span_.first == span_.page_keys) {
      span_.first = 0;
      ++span_.pages;
    }
    const RowRun run{key, taken * span_.heads, span_.heads > 1 ? span_.head_step : span_.key_step};
    last_ = run.first + (run.rows - 1) * run.step;
    return run;
  }

  // From now on of another head; returns by how much the rows at hand move.
  int64_t turn_to(int64_t head) {
    const int64_t bytes = (head - span_.head) * span_.head_step;
    span_.head = then_.head = head;
    return bytes;
  }

 private:
  RowSpan span_, then_;
  const char* last_ = nullptr;
};

// One row after the other.
class RowWalk {
 public:
  explicit RowWalk(const RowSpan& span) : RowWalk(span, RowSpan{nullptr, 1, 0, 0, 0, 0}) {}
  RowWalk(const RowSpan& span, const RowSpan& then) : runs_(span, then), run_(runs_.next()) {}

  // How many rows come next that lie evenly spaced.
  int64_t even() const { return run_.rows; }
  // The next n of these; or the next two, which always do.
  RowRun take(int64_t n) {
    RowRun rows{run_.first, n, run_.step};
    if (n > run_.rows) {
      const char* first = next();
      rows = {first, 2, next() - first};
    } else {
      skip(n);
    }
    return rows;
  }

  SELFATTN_INLINE const char* next() {
    const char* row = run_.first;
    run_.first += run_.step;
    if (--run_.rows == 0) run_ = runs_.next();
    return row;
  }
  void skip(int64_t rows) {
    while (rows >= run_.rows) {
      rows -= run_.rows;
      run_ = runs_.next();
    }
    run_.first += rows * run_.step;
    run_.rows -= rows;
  }
  // The same rows of another head.
  RowWalk of_head(int64_t head) const {
    RowWalk walk = *this;
    walk.run_.first += walk.runs_.turn_to(head);
    return walk;
  }

 private:
  RowRuns runs_;
  RowRun run_;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
