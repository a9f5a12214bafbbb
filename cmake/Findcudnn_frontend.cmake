# The headers of NVIDIA's cudnn-frontend (PyPI package nvidia-cudnn-frontend), which describe graphs to cuDNN. Looked
# for in CUDNN_FRONTEND_INCLUDE_DIR, among the packages of the first python3, and where
# `scripts/install_deps.sh --cuda` puts them. Other versions than the one pinned there usually serve too.
include(${CMAKE_CURRENT_LIST_DIR}/python_packages.cmake)
unset(CUDNN_FRONTEND_VERSION)
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../scripts/cudnn_frontend_version.txt cudnn_frontend_pinned)
set(cache $ENV{XDG_CACHE_HOME})
if(NOT cache)
  set(cache $ENV{HOME}/.cache)
endif()
tessera_python_packages(packages)
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h
  HINTS ${cache}/tessera/cudnn_frontend-${cudnn_frontend_pinned} ${packages} PATH_SUFFIXES include)
if(EXISTS "${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend_version.h")
  file(STRINGS ${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend_version.h lines
    REGEX "#define CUDNN_FRONTEND_(MAJOR|MINOR|PATCH)_VERSION ")
  string(REGEX REPLACE "[^0-9;]" "" CUDNN_FRONTEND_VERSION "${lines}")
  list(JOIN CUDNN_FRONTEND_VERSION . CUDNN_FRONTEND_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(cudnn_frontend REQUIRED_VARS CUDNN_FRONTEND_INCLUDE_DIR CUDNN_FRONTEND_VERSION
  VERSION_VAR CUDNN_FRONTEND_VERSION
  REASON_FAILURE_MESSAGE "run scripts/install_deps.sh --cuda, or `pip install nvidia-cudnn-frontend==${cudnn_frontend_pinned}`, or name the folder of cudnn_frontend.h with -DCUDNN_FRONTEND_INCLUDE_DIR=...")
mark_as_advanced(CUDNN_FRONTEND_INCLUDE_DIR)
