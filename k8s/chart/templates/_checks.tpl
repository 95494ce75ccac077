{{/* What the schema cannot say. Each message says what to do. */}}
{{- define "paceline.checks" -}}
{{- $v := .Values -}}

{{- $fullname := include "paceline.fullname" . -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $fullname) -}}
{{- fail (printf "objects would be called %s-..., but names of Services begin with a letter and have no dots: set fullnameOverride, such as paceline" $fullname) -}}
{{- end -}}

{{- $least := add $v.drain.preStopSeconds $v.drain.timeoutSeconds 5 -}}
{{- with $v.drain.terminationGracePeriodSeconds -}}
{{- if lt (int .) (int $least) -}}
{{- fail (printf "drain.terminationGracePeriodSeconds is %d: pods would be killed while they drain; give at least %d (preStopSeconds + timeoutSeconds + 5), or null to have it computed" (int .) (int $least)) -}}
{{- end -}}
{{- end -}}

{{- if eq $v.discovery.mode "static" -}}
{{- if not $v.discovery.static.verifiers -}}
{{- fail "discovery.mode is static, but discovery.static.verifiers is empty: list the addresses host:port of verifiers" -}}
{{- end -}}
{{- if or $v.verifiers $v.drafters -}}
{{- fail "discovery.mode is static, so gateways would never use the pools of this release: set verifiers: [] and drafters: [], or use discovery.mode kubernetes or dns" -}}
{{- end -}}
{{- else -}}
{{- if not $v.verifiers -}}
{{- fail "verifiers is empty: name at least one pool, such as [{name: target}], or list verifiers that run elsewhere with discovery.mode static" -}}
{{- end -}}
{{- if or $v.discovery.static.verifiers $v.discovery.static.drafters -}}
{{- fail (printf "discovery.static is given, but discovery.mode is %s: set discovery.mode to static or empty the lists" $v.discovery.mode) -}}
{{- end -}}
{{- end -}}

{{- if eq $v.redis.mode "external" -}}
{{- if not $v.redis.external.existingSecret -}}
{{- fail "redis.mode is external: name the secret that holds the URL in redis.external.existingSecret" -}}
{{- end -}}
{{- else if $v.redis.external.existingSecret -}}
{{- fail (printf "redis.external.existingSecret is given, but redis.mode is %s: set redis.mode to external or remove it" $v.redis.mode) -}}
{{- end -}}
{{- if and (eq $v.redis.mode "memory") (or (gt (int $v.gateway.replicas) 1) $v.gateway.autoscaling.enabled) -}}
{{- fail "redis.mode memory keeps sessions in one gateway's process: set gateway.replicas to 1 and gateway.autoscaling.enabled to false, or use redis.mode embedded or external" -}}
{{- end -}}
{{- if and $v.redis.embedded.auth.existingSecret $v.redis.embedded.auth.password -}}
{{- fail "redis.embedded.auth: give existingSecret or password, not both" -}}
{{- end -}}

{{- if and $v.apiKeys.existingSecret $v.apiKeys.values -}}
{{- fail "apiKeys: give existingSecret or values, not both" -}}
{{- end -}}
{{- /* Here and not in the schema, whose complaints quote the value. */ -}}
{{- range $tenant, $key := $v.apiKeys.values -}}
{{- if not (regexMatch "^[!-~]+$" $key) -}}
{{- fail (printf "apiKeys.values.%s: a key has visible ASCII characters only, and no spaces" $tenant) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[A-Za-z0-9._~-]*$" $v.redis.embedded.auth.password) -}}
{{- fail "redis.embedded.auth.password stands in a URL: use letters, digits and . _ ~ - only" -}}
{{- end -}}
{{- $keys := values $v.apiKeys.values -}}
{{- if ne (len $keys) (len (uniq $keys)) -}}
{{- fail "apiKeys.values: two names have the same key; give each its own" -}}
{{- end -}}

{{- if $v.tls.enabled -}}
{{- if not $v.tls.serverSecret -}}
{{- fail "tls.enabled: name the secret with tls.crt, tls.key and ca.crt of the replicas in tls.serverSecret" -}}
{{- end -}}
{{- if and $v.tls.mutual (not $v.tls.clientSecret) -}}
{{- fail "tls.mutual: name the secret with tls.crt and tls.key of the gateways in tls.clientSecret" -}}
{{- end -}}
{{- else if or $v.tls.serverSecret $v.tls.clientSecret $v.tls.mutual -}}
{{- fail "tls has values but is off: set tls.enabled to true or remove them" -}}
{{- end -}}
{{- if and $v.gateway.ingress.enabled (not $v.gateway.ingress.hosts) -}}
{{- fail "gateway.ingress.enabled: name at least one host in gateway.ingress.hosts" -}}
{{- end -}}
{{- if and (not $v.gateway.serviceAccount.create) (not $v.gateway.serviceAccount.name) (eq $v.discovery.mode "kubernetes") -}}
{{- fail "gateway.serviceAccount.create is false: name the account in gateway.serviceAccount.name; it needs get, list and watch on endpointslices in this namespace" -}}
{{- end -}}

{{- include "paceline.checkLabels" (dict "where" "commonLabels" "labels" $v.commonLabels) -}}
{{- include "paceline.checkLabels" (dict "where" "podMonitor.labels" "labels" $v.podMonitor.labels) -}}
{{- range $label, $_ := $v.podMonitor.labels -}}
{{- if hasKey $v.commonLabels $label -}}
{{- fail (printf "podMonitor.labels: %s is in commonLabels already; remove one of them" $label) -}}
{{- end -}}
{{- end -}}
{{- include "paceline.checkWorkload" (dict "where" "gateway" "workload" $v.gateway) -}}
{{- range $lane := list "verifier" "drafter" -}}
{{- $names := list -}}
{{- range $item := index $v (printf "%ss" $lane) -}}
{{- $where := printf "%ss[%s]" $lane $item.name -}}
{{- if has $item.name $names -}}
{{- fail (printf "%s: two pools have this name; give each its own" $where) -}}
{{- end -}}
{{- $names = append $names $item.name -}}
{{- $pool := include "paceline.pool" (dict "root" $ "lane" $lane "item" $item) | fromJson -}}
{{- include "paceline.checkWorkload" (dict "where" $where "workload" $pool) -}}
{{- include "paceline.checkPool" (dict "where" $where "pool" $pool) -}}
{{- end -}}
{{- end -}}
{{- include "paceline.checkFeatures" . -}}
{{- end -}}

{{/* Of gateways and pools alike. Takes where, workload. */}}
{{- define "paceline.checkWorkload" -}}
{{- $scaling := .workload.autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.minReplicas %d is more than maxReplicas %d; swap or change them" .where (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- $pdb := .workload.pdb -}}
{{- if and (not (kindIs "invalid" $pdb.maxUnavailable)) (not (kindIs "invalid" $pdb.minAvailable)) -}}
{{- fail (printf "%s: pdb takes maxUnavailable or minAvailable, not both; set the other to null" .where) -}}
{{- end -}}
{{- if and (kindIs "invalid" $pdb.maxUnavailable) (kindIs "invalid" $pdb.minAvailable) (ne (toString $pdb.enabled) "false") -}}
{{- fail (printf "%s: pdb needs maxUnavailable or minAvailable; set one, or set pdb.enabled to false" .where) -}}
{{- end -}}
{{- if and (eq (default "" .workload.strategy.type) "Recreate") .workload.strategy.rollingUpdate -}}
{{- fail (printf "%s: strategy.rollingUpdate has no meaning with type Recreate; remove one of them" .where) -}}
{{- end -}}
{{- with .workload.strategy.rollingUpdate -}}
{{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s: with maxSurge 0 and maxUnavailable 0 no rollout can begin; raise one of them" $.where) -}}
{{- end -}}
{{- end -}}
{{- $owned := dict "HOME" "nothing: /tmp is all that can be written to" "XDG_CACHE_HOME" "modelCache" "HF_HOME" "modelCache" "HF_TOKEN" "hub.token" "HF_ENDPOINT" "hub.endpoint" "HF_HUB_OFFLINE" "hub.offline" "REDIS_PASSWORD" "redis.embedded.auth" -}}
{{- range $entry := .workload.env -}}
{{- if hasPrefix "PACELINE_" .name -}}
{{- fail (printf "%s: env %s: write it as a setting, such as settings: {max_sessions: 8}, so that it is checked" $.where .name) -}}
{{- end -}}
{{- with get $owned .name -}}
{{- fail (printf "%s: env %s is set by the chart; use %s" $.where $entry.name .) -}}
{{- end -}}
{{- end -}}
{{- include "paceline.checkLabels" (dict "where" (printf "%s: podLabels" .where) "labels" .workload.podLabels) -}}
{{- end -}}

{{/* Takes where, labels. */}}
{{- define "paceline.checkLabels" -}}
{{- range $label, $_ := .labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) (hasPrefix "paceline/" $label) -}}
{{- fail (printf "%s: %s is set by the chart; choose another label" $.where $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes where, pool. */}}
{{- define "paceline.checkPool" -}}
{{- $pool := .pool -}}
{{- $many := or (gt (int $pool.replicas) 1) $pool.autoscaling.enabled -}}
{{- if and (eq $pool.modelCache.type "pvc") (not $pool.modelCache.existingClaim) $many (not (has "ReadWriteMany" $pool.modelCache.accessModes)) -}}
{{- fail (printf "%s: several replicas cannot share a ReadWriteOnce model cache; set modelCache.accessModes to [ReadWriteMany], or modelCache.type to emptyDir" .where) -}}
{{- end -}}
{{- if and (eq $pool.modelCache.type "emptyDir") $pool.modelCache.existingClaim -}}
{{- fail (printf "%s: modelCache.existingClaim needs modelCache.type pvc" .where) -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled (kindIs "invalid" $pool.autoscaling.targetQueueTimeSeconds) (kindIs "invalid" $pool.autoscaling.targetUtilization) -}}
{{- fail (printf "%s: autoscaling needs targetQueueTimeSeconds or targetUtilization" .where) -}}
{{- end -}}
{{- range $resource, $count := default dict $pool.resources.limits -}}
{{- if and (contains "/" $resource) (gt (int $count) 1) -}}
{{- fail (printf "%s: resources.limits asks for %d of %s, but a model runs on one device and the others would idle; ask for 1 and raise replicas" $.where (int $count) $resource) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $pool "method" -}}
{{- include "paceline.checkDrafter" . -}}
{{- else -}}
{{- $own := $pool.selfDraft -}}
{{- $needsHead := has $own.method (list "medusa" "eagle" "eagle3") -}}
{{- if and $needsHead (not $own.head) -}}
{{- fail (printf "%s: selfDraft.method %s needs a head that was trained for the target: give its path in model.volume, or its hub id, as selfDraft.head" .where $own.method) -}}
{{- end -}}
{{- if and $own.head (not $needsHead) -}}
{{- fail (printf "%s: selfDraft.head is given, but selfDraft.method is %s: set it to medusa, eagle or eagle3, or remove the head" .where $own.method) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Methods, models and heads of a pool of drafters. Takes where, pool. */}}
{{- define "paceline.checkDrafter" -}}
{{- $pool := .pool -}}
{{- $method := join "," $pool.method -}}
{{- if and (not $pool.model) (has "draft_model" $pool.method) -}}
{{- fail (printf "%s: method %s needs the draft model in `model`; only ngram does without" .where $method) -}}
{{- end -}}
{{- if gt (len (without $pool.method "ngram")) 1 -}}
{{- fail (printf "%s: a drafter runs one model or head, not all of %s; give each a pool, or keep one of them behind ngram" .where $method) -}}
{{- end -}}
{{- $headMethod := include "paceline.headMethod" $pool -}}
{{- if and $headMethod (not $pool.head) -}}
{{- fail (printf "%s: method %s needs a head that was trained for the target: give its path in model.volume, or its hub id, as `head`" .where $method) -}}
{{- end -}}
{{- if and $pool.head (not $headMethod) -}}
{{- fail (printf "%s: head is given, but method %s has none; use medusa, eagle or eagle3, or remove it" .where $method) -}}
{{- end -}}
{{- end -}}

{{/* A verifier keeps the hidden states of one kind: those of all heads that build on them must agree. Takes root. */}}
{{- define "paceline.checkFeatures" -}}
{{- $seen := dict -}}
{{- range $item := .Values.drafters -}}
{{- $pool := include "paceline.pool" (dict "root" $ "lane" "drafter" "item" $item) | fromJson -}}
{{- with include "paceline.headMethod" $pool -}}
{{- $_ := set $seen (include "paceline.featuresOf" (dict "method" . "head" $pool.head)) (printf "drafters[%s]" $item.name) -}}
{{- end -}}
{{- end -}}
{{- if gt (len $seen) 1 -}}
{{- fail (printf "%s build on different hidden states of the target, and a verifier serves one kind: give them the same head, or put one into a release of its own" (values $seen | sortAlpha | join " and ")) -}}
{{- end -}}
{{- $served := index (append (keys $seen) "none") 0 -}}
{{- range $item := .Values.verifiers -}}
{{- $pool := include "paceline.pool" (dict "root" $ "lane" "verifier" "item" $item) | fromJson -}}
{{- $own := include "paceline.featuresOf" $pool.selfDraft -}}
{{- $serves := get (default dict $pool.settings) "served_features" | default $served -}}
{{- if not (or (eq $own "none") (eq $serves "none") (eq $own $serves)) -}}
{{- fail (printf "verifiers[%s]: drafts from %s by itself and would serve %s to drafters, but a verifier keeps one kind of hidden states: set selfDraft.method to none, or give the drafters the same head" $item.name $own $serves) -}}
{{- end -}}
{{- end -}}
{{- end -}}
