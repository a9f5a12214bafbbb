# NCCL by header and library: beside the toolkit, in the system, under NCCL_ROOT, or in the PyPI package
# nvidia-nccl-cu13 of the first python3.
include(${CMAKE_CURRENT_LIST_DIR}/python_packages.cmake)
tessera_python_packages(packages)
list(TRANSFORM packages APPEND /nvidia/nccl OUTPUT_VARIABLE hints)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${hints} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR} ${hints} PATH_SUFFIXES lib lib64)
if(EXISTS "${NCCL_INCLUDE_DIR}/nccl.h")
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" NCCL_VERSION "${lines}")
  list(JOIN NCCL_VERSION . NCCL_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR NCCL_VERSION VERSION_VAR NCCL_VERSION
  REASON_FAILURE_MESSAGE "NCCL 2 is needed for -DTESSERA_CUDA=ON: install its development package, or name its folder with -DNCCL_ROOT=...")
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
