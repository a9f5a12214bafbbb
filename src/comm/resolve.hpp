#pragma once
#include <netdb.h>

#include <memory>
#include <string>

#include "comm/store_wire.hpp"

namespace tessera::store {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// What asks the system; as getaddrinfo.
using Lookup = int (*)(const char*, const char*, const addrinfo*, addrinfo**);

/// The addresses behind a name or number, for TCP; none, with `reason` filled in, if there are none or the
/// resolver has not answered by `deadline`: getaddrinfo knows no deadline, and a name server that is gone
/// costs it minutes. Errors: IoError when no thread can be had.
Addresses resolve(const std::string& address, const std::string& port, Deadline deadline, std::string& reason,
                  Lookup lookup = ::getaddrinfo);

}  // namespace tessera::store
