#include "checkpoint/pickle.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "checkpoint/file_io.hpp"

namespace tessera::checkpoint_detail {
namespace {

using Kind = PickleValue::Kind;

/// Of a hostile pickle each byte could become a value, each many times as large.
constexpr std::size_t kMostValues = 8'000'000;

constexpr std::array kPlainGlobals = {"collections.OrderedDict",
                                      "collections.Counter",
                                      "collections.defaultdict",
                                      "argparse.Namespace",
                                      "types.SimpleNamespace",
                                      "builtins.set",
                                      "builtins.bytearray",
                                      "builtins.complex",
                                      "builtins.dict",
                                      "builtins.list",
                                      "builtins.int",
                                      "builtins.slice",
                                      "_codecs.encode",
                                      "pathlib.PosixPath",
                                      "pathlib.PurePosixPath",
                                      "datetime.timedelta",
                                      "pathlib._local.PosixPath",
                                      "signal.Signals",
                                      "_io.BytesIO",
                                      "io.BytesIO",
                                      "enum.Enum"};
constexpr std::array kPackages = {
    "torch.", "megatron.", "numpy.", "apex.", "transformer_engine.", "deepspeed.", "nvidia_resiliency_ext."};

/// Python 2's names of the same modules.
std::string present_name(const std::string& module, const std::string& name) {
  return (module == "__builtin__" ? std::string("builtins") : module) + "." + name;
}

/// Nothing is ever called, so a name does no harm: but a pickle with any other one is no checkpoint, and who
/// loads it with Python should hear of it.
bool is_known(const std::string& global) {
  return std::find(kPlainGlobals.begin(), kPlainGlobals.end(), global) != kPlainGlobals.end() ||
         std::any_of(kPackages.begin(), kPackages.end(),
                     [&](const char* package) { return global.starts_with(package); });
}

bool is_dict(const std::string& global) {
  return global == "collections.OrderedDict" || global == "collections.Counter" ||
         global == "collections.defaultdict" || global == "builtins.dict";
}
bool is_namespace(const std::string& global) {
  return global == "argparse.Namespace" || global == "types.SimpleNamespace";
}

}  // namespace

const PickleValue* PickleValue::find(std::string_view key) const {
  const auto it = std::find_if(entries.rbegin(), entries.rend(), [&](const auto& entry) {
    return entry.first->kind == Kind::text && entry.first->text == key;
  });
  return it == entries.rend() ? nullptr : it->second;
}

std::string PickleValue::describe() const {
  constexpr std::array names = {"None",  "bool", "int",  "float",  "str",    "bytes",        "list",
                                "tuple", "set",  "dict", "global", "object", "persistent id"};
  const std::string name = names[static_cast<std::size_t>(kind)];
  return kind == Kind::global || kind == Kind::object ? name + " " + text : name;
}

/// A stack machine, as pickles are written for.
class Pickle::Machine {
 public:
  Machine(Pickle& pickle, std::span<const std::byte> bytes, const std::string& origin)
      : pickle_(pickle), bytes_(bytes), origin_(origin) {}

  const PickleValue* run() {
    while (true) {
      const auto code = static_cast<unsigned char>(take(1)[0]);
      if (code == '.') return pop();
      if (!constant(code) && !container(code) && !memory(code) && !reference(code))
        fail("opcode " + std::to_string(code) + " is not one that checkpoints are made of");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    bad_file(origin_, detail::concat("pickle, byte ", at_), reason,
             "It is damaged, or not a checkpoint that PyTorch wrote; nothing of it was run.");
  }

  std::span<const std::byte> take(std::uint64_t count) {
    if (count > bytes_.size() - at_) fail("it ends before its values do");
    const auto part = bytes_.subspan(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return part;
  }
  std::uint64_t number(std::size_t width) {
    std::uint64_t value = 0;
    std::memcpy(&value, take(width).data(), width);
    return value;
  }
  std::string text(std::uint64_t count) {
    const auto part = take(count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  std::string line() {
    const auto rest = bytes_.subspan(at_);
    const auto end = std::find(rest.begin(), rest.end(), std::byte{'\n'});
    if (end == rest.end()) fail("it ends before its values do");
    std::string value = text(static_cast<std::uint64_t>(end - rest.begin()));
    ++at_;
    return value;
  }

  PickleValue* make(Kind kind) {
    if (pickle_.values_.size() >= kMostValues)
      fail(detail::concat("it holds more than ", kMostValues, " values"));
    PickleValue& value = pickle_.values_.emplace_back();
    value.kind = kind;
    return &value;
  }
  void push(PickleValue* value) { stack_.push_back(value); }
  PickleValue* push_new(Kind kind) {
    push(make(kind));
    return stack_.back();
  }
  void push_integer(std::int64_t integer, Kind kind = Kind::integer) { push_new(kind)->integer = integer; }
  void push_text(Kind kind, std::uint64_t count) {
    std::string value = text(count);
    push_new(kind)->text = std::move(value);
  }
  void push_long(std::uint64_t width) {
    const auto digits = take(width);
    if (digits.size() > 8) {
      push_new(Kind::text)->text = "LONG";
      return;
    }
    std::uint64_t value = 0;
    if (!digits.empty()) {
      value = (std::to_integer<int>(digits.back()) & 0x80) != 0 ? ~std::uint64_t{0} : 0;
      std::memcpy(&value, digits.data(), digits.size());
    }
    push_integer(static_cast<std::int64_t>(value));
  }

  PickleValue* top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("a value is missing");
    return stack_.back();
  }
  PickleValue* pop() {
    PickleValue* value = top();
    stack_.pop_back();
    return value;
  }
  std::vector<PickleValue*> pop_to_mark() {
    if (marks_.empty()) fail("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickleValue*> values(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return values;
  }
  void push_tuple(std::size_t count) {
    std::vector<const PickleValue*> items(count);
    while (count > 0) items[--count] = pop();
    push_new(Kind::tuple)->items = std::move(items);
  }

  bool constant(unsigned char code) {
    switch (code) {
      case 0x80:  // PROTO
        if (const auto version = number(1); version < 2 || version > 5)
          fail(detail::concat("protocol ", version, " is not read; 2 to 5 are"));
        return true;
      case 0x95:  // FRAME
        take(8);
        return true;
      case 'N':
        push_new(Kind::none);
        return true;
      case 0x88:
      case 0x89:
        push_integer(code == 0x88, Kind::boolean);
        return true;
      case 'K':
        push_integer(static_cast<std::int64_t>(number(1)));
        return true;
      case 'M':
        push_integer(static_cast<std::int64_t>(number(2)));
        return true;
      case 'J':
        push_integer(static_cast<std::int32_t>(number(4)));
        return true;
      case 0x8a:  // LONG1
        push_long(number(1));
        return true;
      case 0x8b:  // LONG4
        push_long(number(4));
        return true;
      case 'G': {  // BINFLOAT, big-endian
        push_new(Kind::real)->real = std::bit_cast<double>(__builtin_bswap64(number(8)));
        return true;
      }
      default:
        return strings(code);
    }
  }

  bool strings(unsigned char code) {
    switch (code) {
      case 0x8c:  // SHORT_BINUNICODE
      case 'U':   // SHORT_BINSTRING: of Python 2, whose str is text
        push_text(Kind::text, number(1));
        return true;
      case 'X':  // BINUNICODE
      case 'T':  // BINSTRING
        push_text(Kind::text, number(4));
        return true;
      case 0x8d:  // BINUNICODE8
        push_text(Kind::text, number(8));
        return true;
      case 'C':  // SHORT_BINBYTES
        push_text(Kind::bytes, number(1));
        return true;
      case 'B':  // BINBYTES
        push_text(Kind::bytes, number(4));
        return true;
      case 0x8e:  // BINBYTES8
      case 0x96:  // BYTEARRAY8
        push_text(Kind::bytes, number(8));
        return true;
      default:
        return false;
    }
  }

  bool container(unsigned char code) {
    switch (code) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case ']':
        push_new(Kind::list);
        return true;
      case ')':
        push_new(Kind::tuple);
        return true;
      case '}':
        push_new(Kind::dict);
        return true;
      case 0x8f:
        push_new(Kind::set);
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push_tuple(code - 0x84u);
        return true;
      case 't':
      case 'l':
      case 0x91: {  // TUPLE, LIST, FROZENSET
        const std::vector<PickleValue*> items = pop_to_mark();
        push_new(code == 't'   ? Kind::tuple
                 : code == 'l' ? Kind::list
                               : Kind::set)
            ->items.assign(items.begin(), items.end());
        return true;
      }
      default:
        return items(code);
    }
  }

  bool items(unsigned char code) {
    switch (code) {
      case 'a': {
        PickleValue* item = pop();
        extend(Kind::list, {item});
        return true;
      }
      case 'e':
        extend(Kind::list, pop_to_mark());
        return true;
      case 0x90:
        extend(Kind::set, pop_to_mark());
        return true;
      case 's': {
        PickleValue* value = pop();
        PickleValue* key = pop();
        set_items({key, value});
        return true;
      }
      case 'u':
        set_items(pop_to_mark());
        return true;
      case 'd': {
        const std::vector<PickleValue*> items = pop_to_mark();
        push_new(Kind::dict);
        set_items(items);
        return true;
      }
      default:
        return false;
    }
  }

  void extend(Kind kind, const std::vector<PickleValue*>& items) {
    PickleValue* to = top();
    if (to->kind != kind) fail("values are appended to a " + to->describe());
    to->items.insert(to->items.end(), items.begin(), items.end());
  }
  void set_items(const std::vector<PickleValue*>& items) {
    PickleValue* to = top();
    if (to->kind != Kind::dict || items.size() % 2 != 0) fail("items are set in a " + to->describe());
    for (std::size_t i = 0; i < items.size(); i += 2) to->entries.emplace_back(items[i], items[i + 1]);
  }

  bool memory(unsigned char code) {
    switch (code) {
      case '0':  // POP
        pop();
        return true;
      case '1':  // POP_MARK
        pop_to_mark();
        return true;
      case '2':  // DUP
        push(top());
        return true;
      case 'q':
        memo_[number(1)] = top();
        return true;
      case 'r':
        memo_[number(4)] = top();
        return true;
      case 0x94:  // MEMOIZE
        memo_[memo_.size()] = top();
        return true;
      case 'h':
        recall(number(1));
        return true;
      case 'j':
        recall(number(4));
        return true;
      default:
        return false;
    }
  }
  void recall(std::uint64_t place) {
    const auto it = memo_.find(place);
    if (it == memo_.end()) fail("it refers to a value that it does not have");
    push(it->second);
  }

  bool reference(unsigned char code) {
    switch (code) {
      case 'c': {  // GLOBAL
        const std::string module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {  // STACK_GLOBAL
        const PickleValue* name = pop();
        const PickleValue* module = pop();
        if (!name->is(Kind::text) || !module->is(Kind::text)) fail("a global's name is no text");
        push_global(module->text, name->text);
        return true;
      }
      case 'Q': {
        const PickleValue* id = pop();
        push_new(Kind::persistent)->items = {id};
        return true;
      }
      case 'R':
      case 0x81: {  // REDUCE, NEWOBJ
        const PickleValue* arguments = pop();
        make_object(*pop(), *arguments);
        return true;
      }
      case 0x92: {  // NEWOBJ_EX
        pop();
        const PickleValue* arguments = pop();
        make_object(*pop(), *arguments);
        return true;
      }
      case 'b': {
        const PickleValue* state = pop();
        set_state(*top(), *state);
        return true;
      }
      default:
        return false;
    }
  }

  void push_global(const std::string& module, const std::string& name) {
    std::string global = present_name(module, name);
    if (!is_known(global))
      fail("it names " + global + ", which has no place in a checkpoint. Do not load this file with Python");
    push_new(Kind::global)->text = std::move(global);
  }

  /// Plain containers become what they are; of anything else there is a record.
  void make_object(const PickleValue& global, const PickleValue& arguments) {
    if (!global.is(Kind::global)) fail("a " + global.describe() + " is called");
    if (!arguments.is(Kind::tuple)) fail("arguments are a " + arguments.describe());
    const std::string& name = global.text;
    const PickleValue* first = arguments.items.empty() ? nullptr : arguments.items.front();
    if (is_dict(name) || is_namespace(name)) {
      PickleValue* dict = push_new(Kind::dict);
      dict->is_namespace = is_namespace(name);
      if (first && first->is(Kind::dict)) dict->entries = first->entries;
      if (first && first->is(Kind::list)) {
        for (const PickleValue* pair : first->items) {
          if (pair->items.size() != 2) fail("an item of a dict is no pair");
          dict->entries.emplace_back(pair->items[0], pair->items[1]);
        }
      }
    } else if (first && (name == "torch.Size" || name == "builtins.set" || name == "builtins.list")) {
      push_new(name == "torch.Size"     ? Kind::tuple
               : name == "builtins.set" ? Kind::set
                                        : Kind::list)
          ->items = first->items;
    } else if (first && name == "_codecs.encode" && first->is(Kind::text)) {
      push_new(Kind::bytes)->text = first->text;
    } else {
      PickleValue* object = push_new(Kind::object);
      object->text = name;
      object->items = arguments.items;
    }
  }

  /// An OrderedDict's state are attributes beside its items, such as a module's versions.
  void set_state(PickleValue& value, const PickleValue& state) {
    if (value.is(Kind::dict) && !value.is_namespace) return;
    if (!value.is(Kind::dict) && !value.is(Kind::object)) fail("a " + value.describe() + " is given a state");
    if (state.is(Kind::dict)) {
      value.entries.insert(value.entries.end(), state.entries.begin(), state.entries.end());
      return;
    }
    if (value.is(Kind::dict)) fail("a namespace's state is a " + state.describe());
    value.items.push_back(&state);
  }

  Pickle& pickle_;
  std::span<const std::byte> bytes_;
  const std::string& origin_;
  std::size_t at_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleValue*> memo_;
};

Pickle::Pickle(std::span<const std::byte> bytes, const std::string& origin) {
  root_ = Machine(*this, bytes, origin).run();
}

}  // namespace tessera::checkpoint_detail
