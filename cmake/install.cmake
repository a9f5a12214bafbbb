# `cmake --install` gives the C++ package (headers, library, find_package files) and the program; a wheel takes only
# the component "python" (python/bindings), so the two never mix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

install(TARGETS tessera EXPORT tesseraTargets COMPONENT development
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN "*.hpp")
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/tesseraConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Finddnnl.cmake ${PROJECT_SOURCE_DIR}/cmake/Findhttplib.cmake DESTINATION ${package_dir} COMPONENT development)

# Tables of `tessera tune` that come with Tessera: where gemm_tables() looks.
file(GLOB tables CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/cuda/gemm_tables/*.txt)
if(tables)
  install(FILES ${tables} DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera/gemm_tables COMPONENT development)
endif()

if(TARGET tessera_program)
  install(TARGETS tessera_program COMPONENT development RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
