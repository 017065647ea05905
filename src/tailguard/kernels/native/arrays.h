// Arrays as Python hands them over, with their shapes checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace tailguard {

namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// An array of this shape (-1: any extent), or an error that says which one it is and what it should be
template <typename T>
const Array<T> &expect(const Array<T> &array, const char *name, std::initializer_list<int64_t> shape) {
    bool fits = array.ndim() == shape.size();
    size_t axis = 0;
    for (int64_t extent : shape) {
        fits = fits && (extent < 0 || int64_t(array.shape(axis)) == extent);
        ++axis;
    }
    if (fits) return array;
    std::string found, wanted;
    for (size_t i = 0; i < array.ndim(); ++i) found += (i ? ", " : "") + std::to_string(array.shape(i));
    for (int64_t extent : shape)
        wanted += (wanted.empty() ? "" : ", ") + (extent < 0 ? std::string("any") : std::to_string(extent));
    throw std::invalid_argument(std::string(name) + " has shape (" + found + "), expected (" + wanted + ").");
}

}  // namespace tailguard
