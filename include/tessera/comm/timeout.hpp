#pragma once
#include "tessera/base/error.hpp"

namespace tessera {

/// Another rank, or the job's store, is not known to be gone but did not come or answer in time.
class CommunicationTimeout : public CommunicationError {
  using CommunicationError::CommunicationError;
};

}  // namespace tessera
