#pragma once
/// Debian's and Ubuntu's libgloo-dev leave this header out, which gloo/transport/tcp/pair.h includes. Here is
/// what that one needs of it: two names, and of one of them its size. Found only where the package has none.

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr;

/// Knows whether the object is still there.
template <typename T>
class WeakNonOwningPtr {
  std::weak_ptr<T> object_;
};

}  // namespace gloo
