// Early returns for absl::Status and absl::StatusOr, for .cc files only.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define MODEL_CONCAT_INNER(a, b) a##b
#define MODEL_CONCAT(a, b) MODEL_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                        \
  do {                                               \
    absl::Status status_of_expr = (expr);            \
    if (!status_of_expr.ok()) return status_of_expr; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_INNER(MODEL_CONCAT(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_INNER(name, lhs, expr) \
  auto name = (expr);                           \
  if (!name.ok()) return name.status();         \
  lhs = std::move(name).value()
