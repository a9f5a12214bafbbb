#pragma once
/// Python's pickles read as plain data: nothing is imported, constructed or called.

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::checkpoint_detail {

/// A value of a pickle. Values are shared where the pickle shares them, so there may be circles.
struct PickleValue {
  enum class Kind {
    none,
    boolean,
    integer,
    real,
    text,   ///< str; of integers beyond 64 bits "LONG"
    bytes,  ///< bytes and bytearray
    list,
    tuple,  ///< torch.Size too
    set,
    dict,       ///< OrderedDict and namespaces too
    global,     ///< a class or function by name: "torch.FloatStorage"
    object,     ///< what a global would have made of arguments and state
    persistent  ///< what stands outside of the pickle: a tensor's storage
  };
  Kind kind = Kind::none;
  bool is_namespace = false;  ///< of a dict
  std::int64_t integer = 0;   ///< boolean: 0 or 1
  double real = 0;
  std::string text;                       ///< text, bytes, global, object: its global
  std::vector<const PickleValue*> items;  ///< list, tuple, set; object: its arguments; persistent: its id
  std::vector<std::pair<const PickleValue*, const PickleValue*>> entries;  ///< dict; object: its state

  /// The value under a key that is a text; null where there is none or this is no dict or object.
  const PickleValue* find(std::string_view key) const;
  bool is(Kind wanted) const { return kind == wanted; }
  /// "dict", "object torch.device", ... for messages.
  std::string describe() const;
};

/// All values of one pickle.
class Pickle {
 public:
  /// Protocols 2 to 5. Errors: CheckpointError naming `origin` and the place: a global that is neither
  /// PyTorch's, Megatron's nor one of Python's plain containers, an unknown opcode, a pickle that ends early
  /// or holds too much.
  Pickle(std::span<const std::byte> bytes, const std::string& origin);

  const PickleValue& root() const { return *root_; }

 private:
  class Machine;
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

}  // namespace tessera::checkpoint_detail
