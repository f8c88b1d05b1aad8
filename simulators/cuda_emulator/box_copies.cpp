#include "box_copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "options.h"
#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "swizzle.h"
#include "tensor_maps.h"
#include "transaction_barriers.h"

namespace selfattn::emulator::boxes {

namespace {

constexpr int kElementBytes = 2;
constexpr uintptr_t kMapAlignment = 64;

struct Box {
  TiledMap map;
  int corner[4];
  unsigned char* destination;
  void* barrier;
  races::Box counted;  // for the race detector
};

std::vector<Box> in_flight;

int rows_of(const TiledMap& map) { return static_cast<int>(map.box[1] * map.box[2] * map.box[3]); }

int bytes_of(const TiledMap& map) { return rows_of(map) * kSwizzledRowBytes; }

// Calls visit(first byte in shared memory, first byte in the tensor or null, bytes in the tensor) for each
// row of the box, before chunks change places; a row may lie partly in the tensor, from its byte `skipped`
// on.
template <class Visit>
void for_rows(const Box& box, const Visit& visit) {
  const TiledMap& map = box.map;
  int row = 0;
  for (uint32_t third = 0; third < map.box[3]; ++third) {
    for (uint32_t second = 0; second < map.box[2]; ++second) {
      for (uint32_t first = 0; first < map.box[1]; ++first, ++row) {
        const int64_t at[4] = {box.corner[0], int64_t{box.corner[1]} + first, int64_t{box.corner[2]} + second,
                               int64_t{box.corner[3]} + third};
        bool inside = true;
        int64_t offset = 0;
        for (int n = 1; n < 4; ++n) {
          inside &= at[n] >= 0 && at[n] < static_cast<int64_t>(map.sizes[n]);
          offset += at[n] * static_cast<int64_t>(map.strides[n - 1]);
        }
        const int64_t begin = std::max<int64_t>(at[0], 0);
        const int64_t end = std::min<int64_t>(at[0] + map.box[0], static_cast<int64_t>(map.sizes[0]));
        unsigned char* to = box.destination + row * kSwizzledRowBytes;
        if (!inside || begin >= end) {
          visit(to, nullptr, 0, 0);
        } else {
          visit(to, static_cast<const unsigned char*>(map.address) + offset + begin * kElementBytes,
                static_cast<int>((begin - at[0]) * kElementBytes),
                static_cast<int>((end - begin) * kElementBytes));
        }
      }
    }
  }
}

void complete(const Box& box) {
  for_rows(box, [](unsigned char* to, const unsigned char* from, int skipped, int bytes) {
    unsigned char row[kSwizzledRowBytes] = {};
    if (from != nullptr) std::memcpy(row + skipped, from, static_cast<size_t>(bytes));
    for (int chunk = 0; chunk < kSwizzledRowBytes; chunk += kChunkBytes)
      std::memcpy(swizzled(to + chunk), row + chunk, kChunkBytes);
  });
  barriers::finish_copy(box.barrier, bytes_of(box.map), box.counted);
}

// Completes the copy at this place, and forgets it.
void complete_at(size_t place) {
  const Box box = in_flight[place];
  in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(place));
  complete(box);
}

}  // namespace

void start_block() { in_flight.clear(); }

void copy(void* shared, const void* map, void* barrier, const int (&corner)[4], const Site& site) {
  if (reinterpret_cast<uintptr_t>(map) % kMapAlignment != 0) {
    fail(whereabouts() + " gives " + to_string(site) + " a tensor map that is not aligned to 64 bytes");
  }
  Box box{};
  if (!read_tiled_map(map, box.map) || box.map.rank != 4 || !box.map.swizzles ||
      box.map.box[0] * kElementBytes != kSwizzledRowBytes) {
    fail(whereabouts() + " gives " + to_string(site) +
         " a tensor map without four dimensions, boxes of 128 bytes and their swizzle");
  }
  const int bytes = bytes_of(box.map);
  check_shared(shared, bytes, kSwizzleAlignment, site);
  std::copy(corner, corner + 4, box.corner);
  box.destination = static_cast<unsigned char*>(shared);
  box.barrier = barrier;

  box.counted = races::begin_box(barriers::begin_copy(barrier, site));
  races::write_box(shared, bytes, box.counted, site);
  for_rows(box, [&](unsigned char*, const unsigned char* from, int, int count) {
    if (from != nullptr) races::read_box(from, count, box.counted, site);
  });
  const Copies when = options().copies;
  if (when == Copies::kEager || (when == Copies::kRandom && random_number() % 4 == 0)) return complete(box);
  std::memset(shared, 0xff, static_cast<size_t>(bytes));
  in_flight.push_back(box);
  // A thread may already wait for nothing but these bytes.
  barriers::copy_is_on_its_way(barrier);
}

void complete_for(void* barrier) {
  for (size_t n = 0; n < in_flight.size() && barriers::lacks_bytes(barrier);) {
    if (in_flight[n].barrier == barrier) {
      complete_at(n);
    } else {
      ++n;
    }
  }
}

void pass() {
  if (options().copies != Copies::kRandom) return;
  for (size_t n = 0; n < in_flight.size();) {
    if (random_number() % 4 == 0) {
      complete_at(n);
    } else {
      ++n;
    }
  }
}

}  // namespace selfattn::emulator::boxes
