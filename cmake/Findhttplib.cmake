# cpp-httplib as Debian and Ubuntu have it: a header, and a library built with the options that its .pc file names. Both
# must be compiled alike, so these are read there.
find_path(HTTPLIB_INCLUDE_DIR httplib.h)
find_library(HTTPLIB_LIBRARY cpp-httplib)
set(HTTPLIB_DEFINITIONS "")
if(HTTPLIB_LIBRARY)
  get_filename_component(folder ${HTTPLIB_LIBRARY} DIRECTORY)
  file(STRINGS ${folder}/pkgconfig/cpp-httplib.pc flags REGEX "^Cflags:")
  string(REGEX MATCHALL "CPPHTTPLIB_[A-Z_]+" HTTPLIB_DEFINITIONS "${flags}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(httplib REQUIRED_VARS HTTPLIB_LIBRARY HTTPLIB_INCLUDE_DIR)
if(httplib_FOUND AND NOT TARGET httplib::httplib)
  add_library(httplib::httplib UNKNOWN IMPORTED)
  set_target_properties(httplib::httplib PROPERTIES IMPORTED_LOCATION ${HTTPLIB_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${HTTPLIB_INCLUDE_DIR} INTERFACE_COMPILE_DEFINITIONS "${HTTPLIB_DEFINITIONS}")
endif()
mark_as_advanced(HTTPLIB_INCLUDE_DIR HTTPLIB_LIBRARY)
