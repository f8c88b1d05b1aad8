// Unit tests without a framework. A file holds TEST(name) { CHECK(...); } blocks and is a program of its own,
// which runs all of them and fails if one check fails.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace selfattn::test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

// Many checks run in loops over thousands of values, so only the first few failures are printed.
inline void fail(const char* file, int line, const std::string& text) {
  constexpr int kShown = 20;
  if (++failures() <= kShown) std::printf("%s:%d: %s\n", file, line, text.c_str());
}

inline int run_all() {
  for (const Test& test : tests()) {
    const int before = failures();
    test.body();
    std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", test.name);
  }
  if (tests().empty()) std::printf("no tests\n");
  return failures() == 0 && !tests().empty() ? 0 : 1;
}

}  // namespace selfattn::test

#define TEST(name)                                                                     \
  static void name();                                                                  \
  [[maybe_unused]] static const bool name##_added = selfattn::test::add(#name, &name); \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) selfattn::test::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)

// Checks the condition like CHECK, and also prints for which values it failed.
#define CHECK_FOR(condition, what)                                                                     \
  do {                                                                                                 \
    if (!(condition)) selfattn::test::fail(__FILE__, __LINE__, "CHECK(" #condition ") for " + (what)); \
  } while (false)

// The statement must throw `Exception` with `part` in its text.
#define CHECK_THROWS(statement, Exception, part)                              \
  do {                                                                        \
    std::string text = "nothing";                                             \
    try {                                                                     \
      statement;                                                              \
    } catch (const Exception& error) {                                        \
      text = error.what();                                                    \
    }                                                                         \
    if (text.find(part) == std::string::npos) {                               \
      selfattn::test::fail(__FILE__, __LINE__, #statement " threw: " + text); \
    }                                                                         \
  } while (false)

int main() { return selfattn::test::run_all(); }
