# Finds what the build takes from Python packages: nanobind, CUTLASS and the XLA FFI headers.
#
# Sets nanobind_DIR, JGG_CUTLASS_INCLUDE_DIR and JGG_XLA_FFI_INCLUDE_DIR. Python is asked where each
# of them is, because pip installs what a backend asks for into another folder than the backend
# itself. Also sets JGG_EMPTY_CUTLASS_INCLUDE_DIR, which has to be searched before
# JGG_CUTLASS_INCLUDE_DIR.

# Sets `output_variable` to the path of `file` in the directory of an installed Python package.
function(jgg_find_in_python_package output_variable package file)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_in_package.py
            ${package} ${file}
    OUTPUT_VARIABLE path
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  message(STATUS "Using ${path}")
  set(${output_variable} ${path} PARENT_SCOPE)
endfunction()

jgg_find_in_python_package(nanobind_DIR nanobind cmake)
jgg_find_in_python_package(JGG_CUTLASS_INCLUDE_DIR cutlass_library source/include)
jgg_find_in_python_package(JGG_XLA_FFI_INCLUDE_DIR jaxlib include)

# CuTe's headers include the instructions of every architecture. Empty headers take the place of
# those that no kernel of sm_90a uses, because reading the real ones took four seconds for each
# source, and many sources take only a few seconds more.
set(JGG_EMPTY_CUTLASS_INCLUDE_DIR ${CMAKE_CURRENT_BINARY_DIR}/empty_cutlass)
foreach(
  header
  copy_traits_sm50 copy_traits_sm100 copy_traits_sm100_tma
  mma_traits_sm61 mma_traits_sm70 mma_traits_sm89 mma_traits_sm90_gmma_sparse
  mma_traits_sm100 mma_traits_sm120 mma_traits_sm120_sparse
)
  # Unlike file(WRITE), this leaves the file's time as it is, so that nothing is compiled again.
  file(CONFIGURE OUTPUT ${JGG_EMPTY_CUTLASS_INCLUDE_DIR}/cute/atom/${header}.hpp CONTENT "")
endforeach()
