# The translation units that kernels are compiled in, and the functions that choose among them, from
# one list: csrc/instances.cmake.
#
# jgg_add_product(<product>
#   NAMESPACE <namespace> ARGUMENTS <type> HEADER <header>)
#
# A function that csrc/ffi calls: cudaError_t <product>(TileConfig, <type> const&, cudaStream_t),
# declared in the header. It calls the first of its instances that is of the tile's kind and of the
# element type in the arguments' `type`.
#
# jgg_add_instances(<product> <function>
#   HEADER <header> TYPES <element type>... [KINDS <kind>...] [ADDITIONS_PER_PAUSE <number>])
#
# A function template of the header, template <ElementType> with the parameters of the product,
# compiled for each of the types in a translation unit of its own, so that they compile side by side.
# KINDS are kCooperative unless given. ADDITIONS_PER_PAUSE: see pace_additions.py.
#
# jgg_write_instances(<variable>) writes all of them and sets the variable to the sources.

function(jgg_add_product product)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAMESPACE;ARGUMENTS;HEADER" "")
  set_property(GLOBAL APPEND PROPERTY JGG_PRODUCTS ${product})
  foreach(property NAMESPACE ARGUMENTS HEADER)
    set_property(GLOBAL PROPERTY JGG_${product}_${property} ${arg_${property}})
  endforeach()
endfunction()

function(jgg_add_instances product function)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "HEADER;ADDITIONS_PER_PAUSE" "TYPES;KINDS")
  if(NOT arg_KINDS)
    set(arg_KINDS kCooperative)
  endif()
  get_property(JGG_NAMESPACE GLOBAL PROPERTY JGG_${product}_NAMESPACE)
  get_property(JGG_ARGUMENTS GLOBAL PROPERTY JGG_${product}_ARGUMENTS)
  set(JGG_HEADER ${arg_HEADER})
  set(JGG_FUNCTION ${function})
  string(
    CONCAT declaration "template <ElementType>\n"
           "cudaError_t ${function}(TileConfig, ${JGG_ARGUMENTS} const&, cudaStream_t);\n"
  )
  set_property(GLOBAL APPEND_STRING PROPERTY JGG_${product}_DECLARATIONS "${declaration}")
  foreach(JGG_TYPE IN LISTS arg_TYPES)
    string(REGEX REPLACE "^k" "" suffix ${JGG_TYPE})
    string(TOLOWER ${suffix} suffix)
    set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/${product}/${function}_${suffix}.cu)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/instance.cu.in ${source} @ONLY)
    set_property(GLOBAL APPEND PROPERTY JGG_INSTANCES ${source})
    if(arg_ADDITIONS_PER_PAUSE)
      set_source_files_properties(
        ${source} PROPERTIES COMPILE_DEFINITIONS
                             JGG_ADDITIONS_PER_PAUSE=${arg_ADDITIONS_PER_PAUSE}
      )
    endif()
    foreach(kind IN LISTS arg_KINDS)
      string(
        CONCAT case
               "  if (config.kind == KernelKind::${kind} && arguments.type == ElementType::${JGG_TYPE}) {\n"
               "    return ${function}<ElementType::${JGG_TYPE}>(config, arguments, stream);\n"
               "  }\n"
      )
      set_property(GLOBAL APPEND_STRING PROPERTY JGG_${product}_CASES "${case}")
    endforeach()
  endforeach()
endfunction()

function(jgg_write_instances variable)
  get_property(products GLOBAL PROPERTY JGG_PRODUCTS)
  get_property(sources GLOBAL PROPERTY JGG_INSTANCES)
  foreach(JGG_PRODUCT IN LISTS products)
    foreach(property NAMESPACE ARGUMENTS HEADER DECLARATIONS CASES)
      get_property(JGG_${property} GLOBAL PROPERTY JGG_${JGG_PRODUCT}_${property})
    endforeach()
    set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/${JGG_PRODUCT}.cc)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/dispatcher.cc.in ${source} @ONLY)
    list(APPEND sources ${source})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
