# jgg_add_kernel_library(<name> ARCH <architecture> SOURCES <source>...)
#
# Adds a static library of kernels for one architecture (90a, ...), compiled with CUTLASS. The
# machine code of FP8 kernels is changed afterwards: see pace_additions.py. What the compiler prints
# about each CUDA source (registers, spills, serialised WGMMA instructions) is installed as
# jax_grouped_gemm/_build/<source>.log, next to the extension. Tests check it.

# Compiling a kernel takes up to 2 GB. Compile only as many kernels at a time as there are cores and
# memory for.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT megabytes QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR jobs "${megabytes} / 2048")
if(jobs GREATER cores)
  set(jobs ${cores})
elseif(jobs LESS 1)
  set(jobs 1)
endif()
set(JGG_NVCC_JOBS ${jobs} CACHE STRING "The most CUDA sources to compile at the same time")
set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=${JGG_NVCC_JOBS})

function(jgg_add_kernel_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "ARCH" "SOURCES")
  add_library(${name} STATIC ${arg_SOURCES})
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_include_directories(${name} PUBLIC csrc)
  target_include_directories(${name} SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_include_directories(
    ${name} SYSTEM PRIVATE ${JGG_EMPTY_CUTLASS_INCLUDE_DIR} ${JGG_CUTLASS_INCLUDE_DIR}
  )
  # -v has ptxas report the registers and spills of each kernel. Instances whose additions are paced
  # are not compressed: see Instances.cmake.
  target_compile_options(
    ${name}
    PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
            $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v
                                                 --compress-mode=size>
  )

  set(log_dir ${CMAKE_CURRENT_BINARY_DIR}/${name}_logs)
  # Logs of sources that no longer exist must not be installed.
  file(GLOB stale RELATIVE ${log_dir} ${log_dir}/*.log)
  set(logs ${arg_SOURCES})
  list(TRANSFORM logs REPLACE ".*/" "")
  list(TRANSFORM logs APPEND .log)
  list(REMOVE_ITEM stale ${logs})
  list(TRANSFORM stale PREPEND ${log_dir}/)
  file(REMOVE ${stale})
  set(launcher ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/compile_kernels.py ${log_dir})
  set_target_properties(
    ${name}
    PROPERTIES CUDA_ARCHITECTURES ${arg_ARCH}-real
               CUDA_STANDARD 20
               CUDA_STANDARD_REQUIRED ON
               CUDA_EXTENSIONS OFF
               CUDA_RUNTIME_LIBRARY Static
               CUDA_COMPILER_LAUNCHER "${launcher}"
               JOB_POOL_COMPILE nvcc
  )
  install(DIRECTORY ${log_dir}/ DESTINATION jax_grouped_gemm/_build)
endfunction()
