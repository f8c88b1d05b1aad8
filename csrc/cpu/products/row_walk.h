// Walks over rows of keys or values in the order of reading, and prefetches some way ahead.
//
// Only so much is under way between memory and a core at once. If every row that is used makes room for one
// that will be, that much is under way all the time, also where one block ends and another begins, from page
// to page and from keys to values.
#pragma once

#include "key_rows.h"

#ifndef SELFATTN_FETCH_INTO
#define SELFATTN_FETCH_INTO 3
#endif

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int kFetchInto = SELFATTN_FETCH_INTO;
constexpr int64_t kLine = 64;  // bytes of a cache line

// Neighbouring keys, or values, of one kv head or of several. With several, all heads' rows of one key come
// before those of the next. They lie page after page; without pages there is a single one.
struct RowSpan {
  const char* const* pages;  // where the rows of head 0 begin
  int64_t page_keys, first;  // keys of a page; where in the first page the span begins
  int64_t keys;
  int64_t key_step, head_step;  // bytes
  int64_t head = 0, heads = 1;  // the first head, and how many

  // Rows that lie anywhere are pages of one row.
  static RowSpan of_list(const char* const* rows, int64_t count) { return {rows, 1, 0, count, 0, 0}; }

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
  // `pages` must have room for most_pages.
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

// The rows of one span and then of another, in evenly spaced runs; after them, the last row for ever. The
// spans must outlive this object.
class RowRuns {
 public:
  RowRuns(const RowSpan& span, const RowSpan* then) : then_(then), head_(span.head) { enter(span); }

  RowRun next() {
    if (keys_ == 0) {
      if (then_ == nullptr || then_->keys == 0) return {last_, INT64_MAX, 0};
      enter(*then_);
      then_ = nullptr;
    }
    const char* key = *page_ + head_ * span_->head_step + first_ * span_->key_step;
    const int64_t in_page = span_->page_keys - first_;
    // With several heads, rows stay evenly spaced beyond a key if no other rows lie between them.
    const bool gaps = span_->heads > 1 && span_->key_step != span_->heads * span_->head_step;
    const int64_t taken = gaps ? 1 : smaller(in_page, keys_);
    keys_ -= taken;
    first_ += taken;
    if (first_ == span_->page_keys) {
      first_ = 0;
      ++page_;
    }
    const RowRun run{key, taken * span_->heads, span_->heads > 1 ? span_->head_step : span_->key_step};
    last_ = run.first + (run.rows - 1) * run.step;
    return run;
  }

  // Turns to the rows of another head, and returns by how many bytes the current ones move.
  int64_t turn_to(int64_t head) {
    const int64_t bytes = (head - head_) * span_->head_step;
    head_ = head;
    return bytes;
  }

 private:
  const RowSpan *span_ = nullptr, *then_;  // the current span, and the one still to enter
  const char* const* page_ = nullptr;
  int64_t first_ = 0, keys_ = 0, head_;  // where in the page, how many are left, of which head
  const char* last_ = nullptr;

  void enter(const RowSpan& span) {
    span_ = &span;
    page_ = span.pages;
    first_ = span.first;
    keys_ = span.keys;
  }
};

// Walks over rows one by one.
class RowWalk {
 public:
  explicit RowWalk(const RowSpan& span, const RowSpan* then = nullptr)
      : runs_(span, then), run_(runs_.next()) {}

  // The number of evenly spaced rows that come next.
  int64_t even() const { return run_.rows; }
  // Takes the next n of these. The next two may always be taken, since any two rows are evenly spaced.
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
    if (--run_.rows == 0) run_ = next_of(runs_);
    return row;
  }
  void skip(int64_t rows) {
    while (rows >= run_.rows) {
      rows -= run_.rows;
      run_ = next_of(runs_);
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
  // Takes rows one by one, for a loop. What changes with every row stays in registers: only the walk, which
  // keeps the runs, has an address.
  class Steps {
   public:
    explicit SELFATTN_INLINE Steps(RowWalk& walk) : runs_(walk.runs_), run_(walk.run_) {}
    SELFATTN_INLINE const char* next() {
      const char* row = run_.first;
      run_.first += run_.step;
      if (--run_.rows == 0) run_ = next_of(runs_);
      return row;
    }

   private:
    RowRuns& runs_;
    RowRun run_;
  };

  int64_t step() const { return run_.step; }
  // Whether only the last row is left, for ever.
  bool ended() const { return run_.step == 0 && run_.rows > INT64_MAX / 2; }

 private:
  RowRuns runs_;
  RowRun run_;

  SELFATTN_OUT_OF_LINE static RowRun next_of(RowRuns& runs) { return runs.next(); }
};

// Prefetches a line. It reads nothing, so the address may lie past the tensor's end. kFetchInto is 3 for all
// levels of caches, 2 for those from the second on; see isa/begin_amx.h.
SELFATTN_INLINE void fetch_ahead(const void* line) { __builtin_prefetch(line, 0, kFetchInto); }

// The rows to prefetch while others are used: a walk ahead of these. A line can be under way only when its
// address has been translated, and a prefetch that waits for that holds up all that follow. Therefore one
// line of every memory page is prefetched some pages earlier.
class RowsAhead {
 public:
  explicit RowsAhead(const RowWalk& rows) : rows_(rows), pages_(rows), left_(INT64_MAX) {}
  // `page_keys`: rows of a page of the cache of keys and values. Where lines come into the level-2 cache,
  // only short pages were measured to gain; longer ones and slots lost up to 10 %.
  static RowsAhead with_pages(const RowWalk& rows, int64_t page_keys) {
    constexpr int64_t kShortCachePage = 32768;  // bytes
    RowsAhead ahead(rows);
    const int64_t step = rows.step() < 0 ? -rows.step() : rows.step();
    if (kFetchInto != 3 && (step == 0 || page_keys > kShortCachePage / step)) return ahead;
    ahead.rows_of_page_ = step > 0 && step < kMemoryPage ? kMemoryPage / step : 1;
    ahead.pages_.skip(kMemoryPagesAhead * ahead.rows_of_page_);
    ahead.left_ = 1;
    return ahead;
  }

  int64_t step() const { return rows_.step(); }
  bool ended() const { return rows_.ended(); }
  int64_t even() const { return rows_.even(); }
  RowRun take(int64_t n) {
    for (left_ -= n; left_ <= 0;) left_ += next_page();
    return rows_.take(n);
  }
  // See RowWalk::Steps.
  class Steps {
   public:
    explicit SELFATTN_INLINE Steps(RowsAhead& ahead)
        : ahead_(ahead), rows_(ahead.rows_), left_(ahead.left_) {}
    SELFATTN_INLINE const char* next() {
      if (--left_ == 0) left_ = ahead_.next_page();
      return rows_.next();
    }

   private:
    RowsAhead& ahead_;
    RowWalk::Steps rows_;
    int64_t left_;
  };

 private:
  // On larger pages than this, some prefetches would be in vain, but none would be missing.
#if defined(__APPLE__) && defined(__aarch64__)
  static constexpr int64_t kMemoryPage = 16384;
#else
  static constexpr int64_t kMemoryPage = 4096;
#endif
  static constexpr int64_t kMemoryPagesAhead = 4;

  RowWalk rows_, pages_;
  int64_t rows_of_page_ = 1, left_;  // left_: until the next page is prefetched

  // Returns the number of rows until the next one.
  SELFATTN_OUT_OF_LINE int64_t next_page() {
    if (pages_.ended()) return INT64_MAX / 2;
    fetch_ahead(pages_.next());
    pages_.skip(rows_of_page_ - 1);
    return rows_of_page_;
  }
};

// Prefetches the same rows line by line, for products with long steps: they ask for a few lines in many
// places, as evenly as time passes. Many at once hold up the loads behind them; none for a while leaves
// memory idle.
class LinesAhead {
 public:
  LinesAhead(const RowsAhead& rows, int64_t row_bytes) : rows_(rows), row_bytes_(row_bytes) { next_run(); }

  // Prefetches as many bytes as are used of other rows meanwhile. Only whole lines are prefetched, and the
  // rest is owed to the next call.
  SELFATTN_INLINE void ask(int64_t bytes) {
    const char* at = at_;
    int64_t owed = owed_ + bytes;
    while (owed > 0) {
      fetch_ahead(at);
      at += kLine;
      owed -= kLine;
      if (at < end_) continue;
      owed_ = owed + (at - end_);  // only a part of the last line was in the run
      next_run();
      at = at_;
      owed = owed_;
    }
    at_ = at;
    owed_ = owed;
  }

 private:
  RowsAhead rows_;
  int64_t row_bytes_;
  const char *at_ = nullptr, *end_ = nullptr;  // rows without gaps
  int64_t owed_ = 0;

  void next_run() {
    if (rows_.ended()) {
      owed_ = INT64_MIN / 2;
      return;
    }
    const int64_t rows = rows_.step() == row_bytes_ ? rows_.even() : 1;
    at_ = rows_.take(rows).first;
    end_ = at_ + rows * row_bytes_;
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
