# Chooses the CUDA compiler: the one in CUDACXX, else the one on PATH, else the one of the Python
# package. A compiler that is too old, or that cannot compile a kernel, is named in a warning and
# passed over, because many machines have such a compiler on PATH for other purposes. But if
# -DCMAKE_CUDA_COMPILER names such a compiler, this is an error.
#
# Sets CMAKE_CUDA_COMPILER. Include this file before CUDA is enabled.

set(JGG_OLDEST_CUDA 13.0)

# Sets `output_variable` to what is wrong with the compiler `nvcc`, or to an empty string if nothing
# is.
function(jgg_find_nvcc_fault output_variable nvcc)
  set(${output_variable} "" PARENT_SCOPE)
  execute_process(
    COMMAND ${nvcc} --version
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 60
  )
  if(NOT result EQUAL 0)
    string(STRIP "${output}" output)
    set(${output_variable} "cannot be run (${result}) ${output}" PARENT_SCOPE)
  elseif(NOT output MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${output_variable} "does not say which release it is" PARENT_SCOPE)
  elseif(CMAKE_MATCH_1 VERSION_LESS JGG_OLDEST_CUDA)
    set(${output_variable} "is of CUDA ${CMAKE_MATCH_1}, but ${JGG_OLDEST_CUDA} is needed" PARENT_SCOPE)
  else()
    set(version ${CMAKE_MATCH_1})
    set(source ${CMAKE_CURRENT_BINARY_DIR}/jgg_nvcc_check.cu)
    file(WRITE ${source} "__global__ void add(float* x) { x[threadIdx.x] += 1; }\n")
    # Run nvcc, the front end and ptxas, because their releases may not fit together.
    execute_process(
      COMMAND ${nvcc} -arch=sm_90a -cubin -o ${source}.cubin ${source}
      RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120
    )
    if(NOT result EQUAL 0)
      string(STRIP "${output}" output)
      set(
        ${output_variable} "is of CUDA ${version}, but does not compile a kernel: ${output}"
        PARENT_SCOPE
      )
    endif()
  endif()
endfunction()

if(CMAKE_CUDA_COMPILER)
  jgg_find_nvcc_fault(fault ${CMAKE_CUDA_COMPILER})
  if(fault)
    message(FATAL_ERROR "CMAKE_CUDA_COMPILER: ${CMAKE_CUDA_COMPILER} ${fault}")
  endif()
else()
  # Search only PATH, because the build must not take a toolkit that the user has not put there.
  find_program(
    JGG_NVCC nvcc
    NO_PACKAGE_ROOT_PATH NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH
  )
  set(candidates $ENV{CUDACXX})
  if(JGG_NVCC)
    list(APPEND candidates ${JGG_NVCC})
  endif()
  list(REMOVE_DUPLICATES candidates)
  foreach(nvcc IN LISTS candidates)
    jgg_find_nvcc_fault(fault ${nvcc})
    if(NOT fault)
      set(CMAKE_CUDA_COMPILER ${nvcc})
      break()
    endif()
    message(WARNING "The CUDA compiler ${nvcc} is passed over: it ${fault}")
  endforeach()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  jgg_find_in_python_package(CMAKE_CUDA_COMPILER nvidia.cu13 bin/nvcc)
endif()
# The Python package keeps its libraries in lib, but its nvcc expects them in lib64.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH bin_dir)
if(EXISTS ${bin_dir}/../lib/libcudart_static.a AND NOT EXISTS ${bin_dir}/../lib64)
  string(APPEND CMAKE_CUDA_FLAGS " -L${bin_dir}/../lib")
endif()
message(STATUS "The CUDA compiler is ${CMAKE_CUDA_COMPILER}")
