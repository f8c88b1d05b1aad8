// Divides the gradients of captured tensors among items of work. Only the function knows on which of their
// elements a score falls. So an item sums up what a range of (batch, head, queries) adds: in the result
// itself if no other item adds to the same elements, and otherwise in a copy. The copies are added up in
// their order. The division, and with it the order of every sum, depends on the shape alone.
#pragma once

#include "attention_params.h"
#include "integers.h"

namespace selfattn {

struct CapturedParts {
  struct Range {
    int64_t first, end;
  };
  struct Item {
    Range batches, heads, strips;
    int64_t copy;  // 0 is the result
  };

  static constexpr int64_t kCopyBytes = int64_t{64} * 1048576;  // bytes of all copies, or twice the result's

  int64_t all_batches, all_heads, all_strips;  // strips are neighbouring queries that are computed together
  bool exclusive_batch, exclusive_head, exclusive_query;
  int64_t batches = 1, heads = 1, queries = 1;  // parts of each
  int64_t copies = 1;

  // Makes about so many items, unless the copies would be too large. Some gradient must be wanted: the size
  // is not 0.
  CapturedParts(const CapturedGradients& g, int64_t items, int64_t of_batches, int64_t of_heads,
                int64_t of_strips)
      : all_batches(of_batches),
        all_heads(of_heads),
        all_strips(of_strips),
        exclusive_batch(g.exclusive_batch),
        exclusive_head(g.exclusive_head),
        exclusive_query(g.exclusive_query) {
    if (exclusive_batch) batches = all_batches;
    if (exclusive_head) heads = all_heads;
    if (exclusive_query) queries = smaller(all_strips, divide_up(items, batches * heads));
    const int64_t bytes = g.size() * static_cast<int64_t>(sizeof(double));
    const int64_t most = 1 + larger(kCopyBytes, 2 * bytes) / bytes;
    int64_t left = smaller(divide_up(items, batches * heads * queries), most);
    const auto divide = [&left, this](bool exclusive, int64_t* parts, int64_t most_parts) {
      if (exclusive) return;
      *parts = smaller(left, most_parts);
      left /= *parts;
      copies *= *parts;
    };
    divide(exclusive_batch, &batches, all_batches);
    divide(exclusive_head, &heads, all_heads);
    divide(exclusive_query, &queries, all_strips);
  }

  SELFATTN_HOST_DEVICE int64_t items() const { return batches * heads * queries; }

  SELFATTN_HOST_DEVICE Item item(int64_t number) const {
    const int64_t query = number % queries, head = number / queries % heads, batch = number / queries / heads;
    int64_t copy = 0;
    if (!exclusive_batch) copy = batch;
    if (!exclusive_head) copy = copy * heads + head;
    if (!exclusive_query) copy = copy * queries + query;
    return {range(batch, batches, all_batches), range(head, heads, all_heads),
            range(query, queries, all_strips), copy};
  }

 private:
  static SELFATTN_HOST_DEVICE Range range(int64_t number, int64_t parts, int64_t size) {
    return {number * size / parts, (number + 1) * size / parts};
  }
};

}  // namespace selfattn
