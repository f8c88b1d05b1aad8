// Sets of options: those that a call of attention uses, and those that a kernel applies.
//
// Note [Declared options]
//     A kernel that knows nothing of an option would compute as if nobody had asked for it. So each kernel
//     lists the options that it applies, an engine refuses calls that use others, and a shortcut inside a
//     kernel, which is written for some of them, takes the calls whose options it lists. A new option is in
//     no list until somebody has written it there. There is deliberately no name for "all options".
#pragma once

#include <cstdint>
#include <initializer_list>

#include "attention_params.h"

namespace selfattn {

// The parts of AttentionParams that change results, or promise something about them. The exactness of
// products is not among them: a kernel may always be more exact than it is asked to be.
enum class Option : uint8_t {
  kMask,
  kOwnMasks,
  kAlibiSlopes,
  kSinks,
  kDropout,
  kWindow,  // a causal mask is a window
  kQueryOffset,
  kSoftcap,
  kPackedQueries,
  kPackedKeys,
  kKeyLengths,
  kQueryOffsets,
  kPages,
  kBatchInvariant,
  kFunction,
  kBlockMap,
  kSelection,
  kCount
};

// Returns the option's name in the operators' schema.
constexpr const char* name_of(Option option) {
  constexpr const char* kNames[] = {"attn_mask",    "mask_shapes",     "alibi_slopes",
                                    "sinks",        "dropout_p",       "is_causal or a window",
                                    "query_offset", "softcap",         "cu_seqlens_q",
                                    "cu_seqlens_k", "seqlens_k",       "query_offsets",
                                    "block_table",  "batch_invariant", "score_function",
                                    "block_map",    "selection"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<size_t>(Option::kCount), "one name each");
  return kNames[static_cast<int>(option)];
}

class OptionSet {
 public:
  constexpr OptionSet() = default;
  constexpr OptionSet(std::initializer_list<Option> options) {
    for (const Option option : options) bits_ |= bit(option);
  }

  constexpr bool has(Option option) const { return (bits_ & bit(option)) != 0; }
  constexpr bool within(OptionSet other) const { return (bits_ & ~other.bits_) == 0; }
  constexpr OptionSet without(OptionSet other) const { return OptionSet(bits_ & ~other.bits_); }
  constexpr OptionSet with(OptionSet other) const { return OptionSet(bits_ | other.bits_); }
  constexpr bool empty() const { return bits_ == 0; }

 private:
  constexpr explicit OptionSet(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t bit(Option option) { return uint32_t{1} << static_cast<int>(option); }

  uint32_t bits_ = 0;
};

// The options by which elements of a batch differ in length and place. element_of() (sequences.h) makes calls
// without them out of one that uses them.
constexpr OptionSet kSequenceOptions = {Option::kOwnMasks,   Option::kPackedQueries, Option::kPackedKeys,
                                        Option::kKeyLengths, Option::kQueryOffsets,  Option::kPages};

// Returns the options that the call uses.
inline OptionSet options_of(const AttentionParams& p) {
  OptionSet used;
  const auto add_if = [&used](bool is_used, Option option) {
    if (is_used) used = used.with({option});
  };
  add_if(p.mask.data != nullptr, Option::kMask);
  add_if(p.sequences.own_masks != nullptr, Option::kOwnMasks);
  add_if(p.alibi_slopes.data != nullptr, Option::kAlibiSlopes);
  add_if(p.sinks.data != nullptr, Option::kSinks);
  add_if(p.dropout.enabled, Option::kDropout);
  add_if(p.window_left >= 0 || p.window_right >= 0, Option::kWindow);
  add_if(p.query_offset != 0, Option::kQueryOffset);
  add_if(p.softcap != 0.0, Option::kSoftcap);
  add_if(p.sequences.query_starts != nullptr, Option::kPackedQueries);
  add_if(p.sequences.key_starts != nullptr, Option::kPackedKeys);
  add_if(p.sequences.key_lengths != nullptr, Option::kKeyLengths);
  add_if(p.sequences.query_offsets != nullptr, Option::kQueryOffsets);
  add_if(p.pages.table != nullptr, Option::kPages);
  add_if(p.batch_invariant, Option::kBatchInvariant);
  add_if(p.function.table != nullptr, Option::kFunction);
  add_if(p.function.map.blocks != nullptr, Option::kBlockMap);
  add_if(p.selection.lists != nullptr, Option::kSelection);
  return used;
}

}  // namespace selfattn
