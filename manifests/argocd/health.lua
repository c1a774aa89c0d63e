-- The health of a CacheAwarePool for Argo CD: Ready, Reconciling and Stalled, as kstatus reads them.
-- Missed SLAs are no matter of health: the pool is what was asked for.
if obj.status == nil or obj.status.conditions == nil then
  return {status = "Progressing", message = "waiting for the operator"}
end
if obj.status.observedGeneration ~= nil and obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "the operator has not seen the last edit yet"}
end
local found = {}
for _, condition in ipairs(obj.status.conditions) do
  found[condition.type] = condition
end
local function text(condition)
  if condition.message ~= nil and condition.message ~= "" then
    return condition.reason .. ": " .. condition.message
  end
  return condition.reason
end
if found.Stalled ~= nil and found.Stalled.status == "True" then
  return {status = "Degraded", message = text(found.Stalled)}
end
if found.Reconciling ~= nil and found.Reconciling.status == "True" then
  return {status = "Progressing", message = text(found.Reconciling)}
end
if found.Ready == nil then
  return {status = "Progressing", message = "waiting for the operator"}
end
if found.Ready.status == "True" then
  return {status = "Healthy", message = text(found.Ready)}
end
return {status = "Progressing", message = text(found.Ready)}
