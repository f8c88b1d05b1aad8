#include "decode/decoder.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace ptx_machine {

namespace {

constexpr int kMostOpenCalls = 20;
constexpr u32 kRegistersOfMultiprocessor = 65536, kMostRegisters = 255, kMultipleOfRegisters = 8;

void add_registers(const std::vector<Operand>& operands, std::vector<u32>& found) {
  for (const Operand& operand : operands) {
    if (operand.kind == Operand::Kind::kRegister) found.push_back(operand.at);
    add_registers(operand.list, found);
  }
}

}  // namespace

void Decoder::fail(const std::string& what) const {
  throw std::runtime_error("ptx machine: cannot read line " + std::to_string(line_) + " of the PTX: " + what);
}

Instruction& Decoder::add(Kind kind) {
  Instruction& instruction = kernel_.code.emplace_back();
  instruction.kind = kind;
  instruction.line = line_;
  instruction.source = source_;
  instruction.inlined_at = inlined_at_;
  return instruction;
}

void Decoder::run() {
  const Module::Function& function = module_.functions.at(kernel_.name);
  has_products_ = module_.text.find("wgmma.mma_async") != std::string::npos;
  body(signature(function, {}), function.end, false);
  add(Kind::kExit);
  find_touched();
}

void Decoder::find_touched() {
  std::unordered_map<u32, u32> numbers;
  for (Product& product : kernel_.products) {
    std::vector<u32> registers = product.results;
    if (product.left_in_registers) registers.insert(registers.end(), product.left, product.left + 4);
    for (const u32 at : registers) {
      const auto number = static_cast<u32>(numbers.size());
      product.registers.push_back(numbers.emplace(at, number).first->second);
    }
  }
  kernel_.product_registers = static_cast<u32>(numbers.size());
  for (const auto& [index, named] : named_) {
    Instruction& instruction = kernel_.code[index];
    instruction.touched = static_cast<u32>(kernel_.touched.size());
    for (const u32 at : named) {
      const auto found = numbers.find(at);
      if (found != numbers.end()) kernel_.touched.push_back(found->second);
    }
    instruction.touched_count = static_cast<u32>(kernel_.touched.size()) - instruction.touched;
  }
}

void Decoder::parameter(const Declaration& declared, bool of_kernel, const std::vector<Place>& arguments,
                        size_t& used) {
  if (!of_kernel) {
    if (used >= arguments.size()) fail("a call with too few arguments");
    scopes_.add(declared.name, arguments[used++]);
    return;
  }
  const u32 at = round_up(kernel_.parameter_bytes, declared.align);
  kernel_.parameters.push_back({at, declared.bytes});
  kernel_.parameter_bytes = at + declared.bytes;
  scopes_.add(declared.name, {Space::kParameters, at});
}

size_t Decoder::signature(const Module::Function& function, const std::vector<Place>& arguments) {
  TextReader in{module_.text, function.begin, function.end};
  scopes_.open();
  size_t used = 0;
  while (!in.done()) {
    const char c = in.text[in.at];
    if (c == '{') {
      // The number is that of .maxnreg, or else as many as each thread can have if the requested blocks fit.
      if (function.is_kernel && kernel_.registers_of_thread == 0 && has_most_threads_) {
        const u32 share = kRegistersOfMultiprocessor / (kernel_.most_threads * blocks_of_multiprocessor_);
        kernel_.registers_of_thread =
            std::min(share, kMostRegisters) / kMultipleOfRegisters * kMultipleOfRegisters;
      }
      return in.at + 1;
    }
    if (c == '(') {
      const size_t begin = ++in.at;
      for (int depth = 1; depth > 0; ++in.at) depth += (in.text[in.at] == '(') - (in.text[in.at] == ')');
      for (const std::string& part : split(in.text.substr(begin, in.at - 1 - begin))) {
        parameter(declarations(part).at(0), function.is_kernel, arguments, used);
      }
    } else if (c == '.') {
      ++in.at;
      const std::string word = in.word();
      if (word == "entry" || word == "func" || word == "visible" || word == "weak") continue;
      const std::string rest = in.until('\n');
      if (word == "maxntid" && function.is_kernel) {
        u32 threads = 1;
        for (const auto& part : split(rest)) threads *= static_cast<u32>(std::atoi(part.c_str()));
        kernel_.most_threads = std::min(kernel_.most_threads, threads);
        has_most_threads_ = true;
      }
      if (word == "minnctapersm")
        blocks_of_multiprocessor_ = static_cast<u32>(std::max(std::atoi(rest.c_str()), 1));
      if (word == "maxnreg") kernel_.registers_of_thread = static_cast<u32>(std::atoi(rest.c_str()));
    } else if (in.word().empty()) {  // a word is the function's name
      fail(std::string("a signature with ") + c);
    }
  }
  fail("a function without a body");
}

// Reads ".loc 1 12 3, function_name $name, inlined_at 2 34 5".
void Decoder::location(const std::string& text) {
  SourceLine place, outer;
  std::sscanf(text.c_str(), ".loc %u %u", &place.file, &place.line);
  if (place.line == 0) return;  // the compiler added this code
  const size_t inlined = text.find("inlined_at");
  if (inlined != std::string::npos)
    std::sscanf(text.c_str() + inlined, "inlined_at %u %u", &outer.file, &outer.line);
  source_ = place;
  inlined_at_ = outer;
}

bool Decoder::label(TextReader& in, Frame& frame) {
  TextReader ahead = in;
  const std::string name = ahead.word();
  ahead.skip();
  if (name.empty() || !ahead.starts(":") || ahead.starts("::")) return false;
  ++ahead.at;
  ahead.skip();
  if (ahead.starts(".branchtargets")) {
    frame.block->targets[name] = split(ahead.until(';').substr(std::strlen(".branchtargets")));
  } else if (!frame.block->labels.emplace(name, static_cast<u32>(kernel_.code.size())).second) {
    fail("a second label " + name);
  }
  in.at = ahead.at;
  return true;
}

void Decoder::body(size_t begin, size_t end, bool called) {
  Frame frame;
  frame.called = called;
  const size_t bottom = scopes_.depth();
  TextReader in{module_.text, begin, end};
  while (!in.done()) {
    line_ = module_.line_at(in.at);
    const char c = in.text[in.at];
    if (c == '{') {
      scopes_.open();
      frame.block = &frame.blocks.emplace_back(Block{frame.block, {}, {}});
      ++in.at;
    } else if (c == '}') {
      ++in.at;
      if (scopes_.depth() == bottom) break;
      scopes_.close();
      frame.block = frame.block->outer;
    } else if (in.starts(".loc") && !in.starts(".local")) {
      location(in.until('\n'));
    } else if (in.starts(".pragma")) {
      in.until(';');
    } else if (c == '.') {
      const std::string text = in.until(';');
      const size_t space = text.find_first_of(" \t");
      if (!scopes_.declare(text.substr(0, space), text.substr(space))) fail("the declaration " + text);
    } else if (!label(in, frame)) {
      statement(trimmed(in.until(';')), frame);
    }
  }
  resolve(frame);
  scopes_.close_to(bottom - 1);
}

void Decoder::resolve(const Frame& frame) {
  const auto target = [&](const Jump& jump) {
    for (const Block* block = jump.block; block != nullptr; block = block->outer) {
      const auto found = block->labels.find(jump.label);
      if (found != block->labels.end()) return found->second;
    }
    fail("no label " + jump.label);
  };
  for (const Jump& jump : frame.branches) kernel_.code[jump.from].target = target(jump);
  for (const Jump& jump : frame.tables) kernel_.tables[jump.from].push_back(target(jump));
  for (const u32 index : frame.returns) kernel_.code[index].target = static_cast<u32>(kernel_.code.size());
}

// Takes "@%p1" or "@!%p1" off the text.
Decoder::Guard Decoder::guard(std::string& text) const {
  Guard guard;
  if (text[0] != '@') return guard;
  guard.negated = text[1] == '!';
  size_t end = guard.negated ? 2 : 1;
  const size_t begin = end;
  while (is_word(text[end])) ++end;
  Register found;
  if (!scopes_.find_register(text.substr(begin, end - begin), &found) || found.bits != 1) {
    fail("the guard of " + text);
  }
  guard.predicate = found.at;
  text = trimmed(text.substr(end));
  return guard;
}

void Decoder::statement(const std::string& text, Frame& frame) {
  std::string rest = text;
  const Guard guarded = guard(rest);
  size_t end = 0;
  while (end < rest.size() && is_opcode(rest[end])) ++end;
  const std::string opcode = rest.substr(0, end);
  rest = trimmed(rest.substr(end));
  std::vector<std::string> words;
  for (size_t at = 0; at <= opcode.size();) {
    const size_t dot = std::min(opcode.find('.', at), opcode.size());
    words.push_back(opcode.substr(at, dot - at));
    at = dot + 1;
  }
  if (words[0] == "call") {
    if (guarded.predicate != kNoOperand) fail("a call with a guard");
    call(rest);
    return;
  }
  Instruction& instruction = add(Kind::kPlain);
  instruction.guard = guarded.predicate;
  instruction.guard_negated = guarded.negated;
  Statement statement{words, {}, instruction, builder_};
  if (branch(statement, rest, frame)) return;
  try {
    for (const auto& part : split(rest)) statement.operands.push_back(operand(part));
    if (!choose(statement)) fail("the instruction " + text);
    instruction.instruction_class = class_of(statement);
    if (!has_products_ || statement.name() == "wgmma") return;
    std::vector<u32> named;
    add_registers(statement.operands, named);
    if (!named.empty()) named_.emplace_back(static_cast<u32>(kernel_.code.size() - 1), std::move(named));
  } catch (const std::exception& error) {
    fail(std::string(error.what()) + ", in " + text);
  }
}

bool Decoder::branch(const Statement& statement, const std::string& rest, Frame& frame) {
  Instruction& instruction = statement.instruction;
  const u32 index = static_cast<u32>(kernel_.code.size() - 1);
  if (statement.name() == "bra") {
    instruction.kind = Kind::kBranch;
    frame.branches.push_back({index, rest, frame.block});
  } else if (statement.name() == "brx") {
    const auto parts = split(rest);
    instruction.kind = Kind::kBranchTable;
    instruction.operands[0] = builder_.source(operand(parts.at(0)), 32);
    instruction.target = static_cast<u32>(kernel_.tables.size());
    kernel_.tables.emplace_back();
    const Block* block = frame.block;
    while (block != nullptr && block->targets.count(parts.at(1)) == 0) block = block->outer;
    if (block == nullptr) fail("no list of labels " + parts.at(1));
    for (const auto& name : block->targets.at(parts.at(1))) {
      frame.tables.push_back({instruction.target, name, block});
    }
  } else if (statement.name() == "ret" && frame.called) {
    instruction.kind = Kind::kBranch;
    frame.returns.push_back(index);
  } else if (statement.name() == "ret" || statement.name() == "exit") {
    instruction.kind = Kind::kExit;
  } else {
    return false;
  }
  return true;
}

std::vector<Place> Decoder::places(const std::string& list) const {
  std::vector<Place> result;
  for (const auto& name : split(list.substr(1, list.size() - 2))) {
    const Place* place = scopes_.find_place(name);
    if (place == nullptr) fail("the argument " + name);
    result.push_back(*place);
  }
  return result;
}

// Decodes "call (result), name, (arguments)".
void Decoder::call(const std::string& text) {
  if (++calls_ > kMostOpenCalls) fail("calls that do not end");
  const std::vector<std::string> parts = split(text);
  std::vector<Place> arguments;
  size_t next = 0;
  if (parts.at(0)[0] == '(') arguments = places(parts[next++]);
  const std::string name = parts.at(next++);
  if (next < parts.size() && parts[next][0] == '(') {
    for (const Place& place : places(parts[next])) arguments.push_back(place);
  }
  const auto found = module_.functions.find(name);
  if (found == module_.functions.end()) fail("no function " + name);
  const u32 line = line_;
  const SourceLine source = source_, inlined_at = inlined_at_;
  body(signature(found->second, arguments), found->second.end, true);
  line_ = line;
  source_ = source;
  inlined_at_ = inlined_at;
  --calls_;
}

Kernel* decode_kernel(Module& module, const std::string& name) {
  const auto known = module.kernels.find(name);
  if (known != module.kernels.end()) return known->second.get();
  const auto found = module.functions.find(name);
  if (found == module.functions.end() || !found->second.is_kernel) return nullptr;
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->module = &module;
  Decoder(module, *kernel).run();
  return (module.kernels[name] = std::move(kernel)).get();
}

}  // namespace ptx_machine
