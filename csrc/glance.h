// Whether modules are what they were: ds_tilemoe/layers/watch.py asks in every forward and knows
// what a change means. Beside bindings.cpp the only file that knows torch.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

namespace tilemoe {

namespace py = pybind11;

// What modules were when it was made: their classes, no hooks and no forward of their own, as many
// names in their tables (what comes may hide something of the class), the same submodules in
// `parents`, in `linears` the same parameters, as large and at the same addresses, with nothing in
// front of them, and the same objects as `attributes`.
class Glance {
 public:
  using Objects = std::vector<py::object>;
  using Tables = std::vector<py::dict>;
  using Attributes = std::vector<std::pair<py::dict, py::str>>;

  // `tables`, `parents` and `linears` are __dict__s, `tables` those of `modules`; `attributes` are
  // such dicts, each with a key of it.
  Glance(Objects modules, Tables tables, Tables parents, Tables linears, Attributes attributes)
      : modules_(std::move(modules)),
        tables_(std::move(tables)),
        parents_(std::move(parents)),
        linears_(std::move(linears)) {
    demand(modules_.size() == tables_.size(), "got " + std::to_string(tables_.size()) +
                                                  " tables, wanted " +
                                                  std::to_string(modules_.size()));
    for (const py::object& module : modules_) types_.push_back(py::type::of(module));
    for (const py::dict& table : tables_) sizes_.push_back(table.size());
    const auto keep = [](Objects& kept) {
      return [&kept](PyObject* value) {
        kept.push_back(py::reinterpret_borrow<py::object>(value));
        return true;
      };
    };
    for (const py::dict& table : parents_) {
      demand(each_value(table, children_key_, keep(children_)), "a parent has no submodules");
    }
    for (const py::dict& table : linears_) {
      demand(each_value(table, parameters_key_, keep(parameters_)), "a linear has no parameters");
      biases_.push_back(value_of(table, bias_key_) != nullptr);
    }
    for (const py::object& parameter : parameters_) operands_.push_back(operand_of(parameter));
    for (auto& [table, key] : attributes) {
      PyObject* const value = value_of(table, key);
      demand(value != nullptr, "there is no attribute " + std::string(key));
      attributes_.push_back({std::move(table), std::move(key)});
      values_.push_back(py::reinterpret_borrow<py::object>(value));
    }
  }

  bool holds() const {
    try {
      return !is_cleared_ && modules_hold() && children_hold() && parameters_hold() &&
             attributes_hold();
    } catch (const c10::Error&) {  // a tensor without memory of its own
      return false;
    }
  }

  // Python's collector sees what this holds: an expert may refer to its layer, and a layer to this.
  static void be_collected(PyHeapTypeObject* heap_type) {
    PyTypeObject* const type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      const Glance* const glance = made(self);
      return glance == nullptr ? 0 : glance->traverse(visit, arg);
    };
    type->tp_clear = [](PyObject* self) -> int {
      if (Glance* const glance = made(self)) glance->clear();
      return 0;
    };
  }

 private:
  // Memory that was given back may come again with another dtype, other sizes or other strides.
  struct Operand {
    bool is_tensor = false;  // else there is no bias
    const PyTypeObject* type = nullptr;
    const void* data = nullptr;
    at::ScalarType dtype = at::ScalarType::Undefined;
    bool is_contiguous = false;
    c10::DimVector sizes;

    // `parameter` is the very object that this was made of.
    bool is_of(PyObject* parameter) const {
      if (!is_tensor) return true;
      const at::Tensor& tensor = THPVariable_Unpack(parameter);
      return Py_TYPE(parameter) == type && tensor.const_data_ptr() == data &&
             tensor.scalar_type() == dtype && tensor.is_contiguous() == is_contiguous &&
             tensor.sizes() == sizes;
    }
  };

  static Operand operand_of(py::handle parameter) {
    if (!THPVariable_Check(parameter.ptr())) return {};
    const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
    return {true,
            Py_TYPE(parameter.ptr()),
            tensor.const_data_ptr(),
            tensor.scalar_type(),
            tensor.is_contiguous(),
            c10::DimVector(tensor.sizes())};
  }

  bool modules_hold() const {
    for (std::size_t i = 0; i < modules_.size(); ++i) {
      if (!py::type::handle_of(modules_[i]).is(types_[i]) || tables_[i].size() != sizes_[i] ||
          value_of(tables_[i], forward_key_) != nullptr ||
          value_of(tables_[i], call_key_) != nullptr || !is_empty(tables_[i], hooks_key_) ||
          !is_empty(tables_[i], pre_hooks_key_)) {
        return false;
      }
    }
    return true;
  }

  bool children_hold() const {
    std::size_t at = 0;
    for (const py::dict& table : parents_) {
      const auto same = [&](PyObject* value) {
        return at < children_.size() && children_[at++].ptr() == value;
      };
      if (!each_value(table, children_key_, same)) return false;
    }
    return at == children_.size();
  }

  bool parameters_hold() const {
    std::size_t at = 0;
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const auto same = [&](PyObject* value) {
        if (at == parameters_.size() || parameters_[at].ptr() != value) return false;
        return operands_[at++].is_of(value);
      };
      PyObject* const bias = value_of(linears_[i], bias_key_);
      if (value_of(linears_[i], weight_key_) != nullptr || (bias != nullptr) != biases_[i] ||
          (bias != nullptr && bias != Py_None) || !each_value(linears_[i], parameters_key_, same)) {
        return false;
      }
    }
    return at == parameters_.size();
  }

  bool attributes_hold() const {
    for (std::size_t i = 0; i < attributes_.size(); ++i) {
      if (value_of(attributes_[i].first, attributes_[i].second) != values_[i].ptr()) return false;
    }
    return true;
  }

  // Null while its __init__ has not ended.
  static Glance* made(PyObject* self) {
    auto* const instance = reinterpret_cast<py::detail::instance*>(self);
    const py::detail::value_and_holder found = instance->get_value_and_holder();
    return found.holder_constructed() ? found.value_ptr<Glance>() : nullptr;
  }

  // All references but those to strings, which refer to nothing.
  int traverse(visitproc visit, void* arg) const {
    for (const Objects* objects : {&modules_, &types_, &children_, &parameters_, &values_}) {
      for (const py::object& object : *objects) Py_VISIT(object.ptr());
    }
    for (const Tables* tables : {&tables_, &parents_, &linears_}) {
      for (const py::dict& table : *tables) Py_VISIT(table.ptr());
    }
    for (const auto& attribute : attributes_) Py_VISIT(attribute.first.ptr());
    return 0;
  }

  // Giving a reference back may run code that asks holds(), so nothing is left here by then.
  void clear() {
    is_cleared_ = true;
    Objects objects[] = {std::exchange(modules_, {}), std::exchange(types_, {}),
                         std::exchange(children_, {}), std::exchange(parameters_, {}),
                         std::exchange(values_, {})};
    Tables tables[] = {std::exchange(tables_, {}), std::exchange(parents_, {}),
                       std::exchange(linears_, {})};
    const Attributes attributes = std::exchange(attributes_, {});
  }

  static void demand(bool holds, const std::string& what) {
    if (!holds) throw py::value_error(what);
  }

  // Null if there is none; borrowed.
  static PyObject* value_of(const py::dict& table, const py::str& key) {
    return PyDict_GetItemWithError(table.ptr(), key.ptr());
  }

  static bool is_empty(const py::dict& table, const py::str& key) {
    PyObject* const found = value_of(table, key);
    return found != nullptr && PyDict_Check(found) && PyDict_GET_SIZE(found) == 0;
  }

  // Whether table[key] is a dict and `visit` is true of all its values.
  template <class Visit>
  static bool each_value(const py::dict& table, const py::str& key, const Visit& visit) {
    PyObject* const found = value_of(table, key);
    if (found == nullptr || !PyDict_Check(found)) return false;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(found, &at, nullptr, &value);) {
      if (!visit(value)) return false;
    }
    return true;
  }

  // As the names of attributes are, so that a lookup compares pointers.
  static py::str interned(const char* name) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
  }

  Objects modules_, types_, children_, parameters_;
  Tables tables_, parents_, linears_;
  Attributes attributes_;
  Objects values_;                  // of the attributes
  std::vector<std::size_t> sizes_;  // of the tables
  std::vector<Operand> operands_;   // of the parameters
  std::vector<bool> biases_;  // of the linears: whether their __dict__ has a "bias", then None
  bool is_cleared_ = false;
  const py::str forward_key_ = interned("forward"), call_key_ = interned("_call_impl"),
                hooks_key_ = interned("_forward_hooks"),
                pre_hooks_key_ = interned("_forward_pre_hooks"),
                children_key_ = interned("_modules"), parameters_key_ = interned("_parameters"),
                weight_key_ = interned("weight"), bias_key_ = interned("bias");
};

}  // namespace tilemoe
