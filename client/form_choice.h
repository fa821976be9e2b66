// What Form::kAuto stands for.
#pragma once

#include "client/model_info.h"

namespace engram::client {

// The form that goes on the wire: kAuto is what the server suggested for this way of reaching it, any other is itself.
// HIGHWAY's bits come of both suggestions there are; UPDATE is an eighth of the reply and leaves an addition here.
inline Form ChooseForm(const ModelInfo& model, Form form) { return form == Form::kAuto ? model.suggested_form : form; }

}  // namespace engram::client
