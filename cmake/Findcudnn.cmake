# cuDNN 9 by header and library: beside the toolkit, in the system, under CUDNN_ROOT, or in the PyPI package
# nvidia-cudnn-cu13 of the first python3.
include(${CMAKE_CURRENT_LIST_DIR}/python_packages.cmake)
tessera_python_packages(packages)
list(TRANSFORM packages APPEND /nvidia/cudnn OUTPUT_VARIABLE hints)
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${hints} PATH_SUFFIXES include)
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${CUDAToolkit_LIBRARY_DIR} ${hints} PATH_SUFFIXES lib lib64)
if(EXISTS "${CUDNN_INCLUDE_DIR}/cudnn_version.h")
  file(STRINGS ${CUDNN_INCLUDE_DIR}/cudnn_version.h lines REGEX "#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) ")
  string(REGEX REPLACE "[^0-9;]" "" CUDNN_VERSION "${lines}")
  list(JOIN CUDNN_VERSION . CUDNN_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(cudnn REQUIRED_VARS CUDNN_LIBRARY CUDNN_INCLUDE_DIR CUDNN_VERSION VERSION_VAR CUDNN_VERSION
  REASON_FAILURE_MESSAGE "cuDNN 9 is needed for -DTESSERA_CUDA=ON: install its development package, or name its folder with -DCUDNN_ROOT=...")
mark_as_advanced(CUDNN_INCLUDE_DIR CUDNN_LIBRARY)
